"""The Spark application that ranks are launched in: its slots, jobs and failures. On the driver."""
