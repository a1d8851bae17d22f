"""The Spark application that runs the ranks: slots, jobs and failures. Runs on the driver."""
