#!/bin/sh
# Run a program in the image: sh submit.sh PROGRAM ARGUMENT...
#
#   sh submit.sh local:///opt/train.py /store
#   sh submit.sh local:///opt/train.py s3a://bucket/experiments
#
# MASTER   Kubernetes' API, such as k8s://https://host:6443
# IMAGE    the image of build.sh
set -eu

spark-submit --master "$MASTER" --deploy-mode cluster --name train \
    --conf spark.kubernetes.namespace=training \
    --conf spark.kubernetes.container.image="$IMAGE" \
    --conf spark.kubernetes.authenticate.driver.serviceAccountName=spark \
    --conf spark.kubernetes.driver.podTemplateFile="$(dirname "$0")/pod.yaml" \
    --conf spark.kubernetes.executor.podTemplateFile="$(dirname "$0")/pod.yaml" \
    --conf spark.dynamicAllocation.enabled=false \
    --conf spark.executor.instances=2 \
    --conf spark.executor.cores=1 \
    --conf spark.executor.memory=2g \
    --conf spark.executor.memoryOverhead=2g \
    --conf spark.driver.memory=2g \
    --conf spark.driver.port=7078 \
    --conf spark.driver.blockManager.port=7079 \
    --conf spark.blockManager.port=7079 \
    "$@"
