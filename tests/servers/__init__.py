"""Real servers on loopback for tests (HDFS, S3, YARN, Spark Connect), and fault injection."""
