"""What ``transform`` does with rows: its UDF and the columns around it."""
