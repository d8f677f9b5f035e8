"""The run folder: complete or garbage; Parquet by declared schema."""
