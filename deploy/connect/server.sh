#!/bin/sh
# Run a Spark Connect server in the foreground, whose executors unpack an environment.
#
# MASTER       Spark's master, such as yarn or spark://host:7077
# ENVIRONMENT  the archive: a file, or a URL that the executors reach (default: environment.tar.gz)
# HOST         the address that clients connect to (default: 0.0.0.0, which is every address)
set -eu

# Spark 4 runs each session's Python in a separate folder, one below the archive's.
export PYSPARK_PYTHON=../environment/bin/python
exec "$SPARK_HOME/bin/spark-submit" --master "$MASTER" \
    --class org.apache.spark.sql.connect.service.SparkConnectServer \
    --archives "${ENVIRONMENT:-environment.tar.gz}#environment" \
    --conf spark.connect.grpc.binding.address="${HOST:-0.0.0.0}" \
    --conf spark.connect.grpc.binding.port="${PORT:-15002}" \
    "$@" \
    spark-internal
