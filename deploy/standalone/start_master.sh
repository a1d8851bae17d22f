#!/bin/sh
# Run the master in the foreground, as systemd does. MASTER is this machine's address.
set -eu
exec "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.master.Master \
    --host "$MASTER" --port 7077 --webui-port 8080
