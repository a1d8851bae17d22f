"""Parquet to batches, on the ranks."""
