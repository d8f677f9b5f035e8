"""Child processes with real time limits and no survivors."""
