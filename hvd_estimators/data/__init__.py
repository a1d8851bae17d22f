"""Parquet datasets and their manifests. Runs on the driver and on ranks."""
