"""Inference of ``transform``: its UDF and the columns around the UDF."""
