#!/bin/sh
# Run a worker in the foreground. HOST is this machine's address, MASTER the master's.
set -eu
exec "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.worker.Worker \
    --host "$HOST" --port 7078 --webui-port 8081 "spark://$MASTER:7077"
