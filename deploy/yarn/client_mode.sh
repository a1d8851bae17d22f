#!/bin/sh
# Run a program on YARN in client mode: its driver runs here, in the folder that was packed.
#
#   sh client_mode.sh [SPARK-OPTION...] PROGRAM ARGUMENT...
#
# ENVIRONMENT  the archive: a file, or a URL such as hdfs:///environments/environment.tar.gz
#              (default: environment.tar.gz)
# DRIVER_ENVIRONMENT  the folder of the same environment on this machine (default: environment)
set -eu

spark-submit --master yarn --deploy-mode client \
    --archives "${ENVIRONMENT:-environment.tar.gz}#environment" \
    --conf spark.pyspark.python=./environment/bin/python \
    --conf spark.pyspark.driver.python="${DRIVER_ENVIRONMENT:-environment}/bin/python" \
    --num-executors 2 --executor-cores 1 \
    --executor-memory 1g --conf spark.executor.memoryOverhead=2g \
    --driver-memory 1g \
    "$@"
