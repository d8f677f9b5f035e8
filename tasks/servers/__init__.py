"""Prefect's server, MLflow's pages and a worker on this machine."""
