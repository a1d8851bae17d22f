#!/bin/sh
# Run a program as a client of the server. USER_ID names the user to the server.
#
#   SERVER=HOST sh client.sh PROGRAM ARGUMENT...
set -eu
export SPARK_REMOTE="sc://$SERVER:${PORT:-15002}/;user_id=${USER_ID:-$(id -un)}"
"${CLIENT_ENVIRONMENT:-environment}/bin/python" "$@"
