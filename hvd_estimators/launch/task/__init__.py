"""A Spark barrier task around a rank: in Spark's Python workers."""
