"""Readers that turn Parquet files into batches. Runs on ranks."""
