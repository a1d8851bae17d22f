"""Parquet datasets and what they hold, on both sides."""
