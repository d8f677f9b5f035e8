"""MLflow: metrics and data links of a run, versions and the champion's gate."""
