"""Spark barrier task that runs a rank. Runs in Spark's Python workers."""
