#!/bin/sh
# Print a machine's GPUs in the format that spark.worker.resource.gpu.discoveryScript expects.
addresses=$(nvidia-smi --query-gpu=index --format=csv,noheader | sed 's/.*/"&"/' | paste -sd, -)
echo "{\"name\": \"gpu\", \"addresses\": [$addresses]}"
