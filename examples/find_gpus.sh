#!/bin/sh
# Tells Spark which GPUs a machine has, as spark.worker.resource.gpu.discoveryScript expects it.
addresses=$(nvidia-smi --query-gpu=index --format=csv,noheader | sed 's/.*/"&"/' | paste -sd, -)
echo "{\"name\": \"gpu\", \"addresses\": [$addresses]}"
