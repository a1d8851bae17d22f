"""One process per rank: in Spark barrier tasks, or on this machine."""
