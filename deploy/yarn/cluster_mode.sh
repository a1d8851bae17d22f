#!/bin/sh
# Run a program on YARN in cluster mode: its driver runs on a node, too.
#
#   sh cluster_mode.sh [SPARK-OPTION...] PROGRAM ARGUMENT...
#
# ENVIRONMENT  the archive: a file, or a URL such as hdfs:///environments/environment.tar.gz
#              (default: environment.tar.gz)
set -eu

spark-submit --master yarn --deploy-mode cluster \
    --archives "${ENVIRONMENT:-environment.tar.gz}#environment" \
    --conf spark.pyspark.python=./environment/bin/python \
    --conf spark.yarn.appMasterEnv.HADOOP_CONF_DIR=./__spark_conf__/__hadoop_conf__ \
    --num-executors 2 --executor-cores 1 \
    --executor-memory 1g --conf spark.executor.memoryOverhead=2g \
    --driver-memory 1g --conf spark.driver.memoryOverhead=1g \
    "$@"
