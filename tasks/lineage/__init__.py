"""Which run goes back to which, and what nothing needs any more."""
