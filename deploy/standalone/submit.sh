#!/bin/sh
# Run a program on the cluster. Its driver runs on this machine.
#
#   MASTER=ADDRESS sh submit.sh [SPARK-OPTION...] PROGRAM ARGUMENT...
set -eu
"$SPARK_HOME/bin/spark-submit" --master "spark://$MASTER:7077" \
    --executor-memory 2g --driver-memory 2g \
    "$@"
