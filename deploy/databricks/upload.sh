#!/bin/sh
# Upload wheels and the init script to a volume, with the Databricks CLI:
#
#   sh upload.sh /Volumes/main/default/hvd_estimators dist/hvd_estimators-*.whl
set -eu
volume="dbfs:$1"
shift
for file in "$(dirname "$0")/install.sh" "$@"; do
    databricks fs cp --overwrite "$file" "$volume/$(basename "$file")"
done
