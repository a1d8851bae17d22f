#!/bin/sh
# Unpack an environment on this machine: run it on the master, on each worker and on the driver.
#
#   sh install_environment.sh environment.tar.gz
set -eu
rm -rf /opt/environment
mkdir -p /opt/environment
tar -xzf "$1" -C /opt/environment
/opt/environment/bin/python -c 'import hvd_estimators'
