"""Conversion of DataFrames to Parquet datasets, on the driver."""
