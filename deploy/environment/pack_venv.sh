#!/bin/sh
# Create a virtual environment and an archive of it.
#
#   sh pack_venv.sh FOLDER PIP-ARGUMENT...
#
# creates the environment FOLDER, and FOLDER.tar.gz for Spark's --archives. PYTHON names the Python
# that all machines of the cluster have at the same path (default: python3).
set -eu
folder=$1
shift

"${PYTHON:-python3}" -m venv --clear "$folder"
"$folder/bin/python" -m pip install "$@"
"$folder/bin/python" -m pip install venv-pack

# The cluster has Spark's Java archives already.
"$folder/bin/venv-pack" --prefix "$folder" --exclude '*/pyspark/jars/*' \
    --quiet --force --output "$folder.tar.gz"
