"""Real servers on loopback for tests: HDFS, S3, a mount like Databricks'; and what goes wrong."""
