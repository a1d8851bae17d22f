"""DataFrame to Parquet, on the driver."""
