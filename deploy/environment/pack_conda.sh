#!/bin/sh
# Create a Conda environment and an archive of it, with Python inside.
#
#   sh pack_conda.sh FOLDER PIP-ARGUMENT...
#
# creates the environment FOLDER, and FOLDER.tar.gz for Spark's --archives. PYTHON_VERSION is the
# version of Python (default: 3.11). This script has not been tested yet.
set -eu
folder=$1
shift

conda create --yes --prefix "$folder" --channel conda-forge "python=${PYTHON_VERSION:-3.11}" pip
"$folder/bin/python" -m pip install "$@"
"$folder/bin/python" -m pip install conda-pack

# The cluster has Spark's Java archives already. Packages of pip may have replaced Conda's.
"$folder/bin/conda-pack" --prefix "$folder" --exclude '*/pyspark/jars/*' \
    --ignore-missing-files --quiet --force --output "$folder.tar.gz"
