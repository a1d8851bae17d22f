#!/bin/sh
# Put the archive into HDFS, where all users can read it.
#
#   sh upload_environment.sh environment.tar.gz /environments
set -eu
hdfs dfs -mkdir -p "$2"
hdfs dfs -put -f "$1" "$2"
hdfs dfs -chmod 644 "$2/$(basename "$1")"
