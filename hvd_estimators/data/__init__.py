"""DataFrame to Parquet to batches."""
