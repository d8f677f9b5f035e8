"""What people see in the terminal and on Prefect's pages."""
