"""Changing, pausing and resuming a run that is under way."""
