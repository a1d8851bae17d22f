#!/bin/sh
# Pack an environment with the Horovod wheel of an index. INDEX is the index that has the wheels.
#
#   INDEX=https://pypi.example.com/simple sh deploy/environment/with_horovod.sh -c constraints.txt
#
# constraints.txt pins torch and TensorFlow as the wheel needs them.
set -eu
sh "$(dirname "$0")/pack_venv.sh" environment --extra-index-url "$INDEX" "$@" \
    '.[keras,torch]' horovod==0.28.1
