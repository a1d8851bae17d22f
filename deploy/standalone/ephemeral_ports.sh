#!/bin/sh
# Limit the ports that ranks listen on, on each worker and on the driver, until the next boot.
# For good: the same line in /etc/sysctl.d/90-spark.conf.
set -eu
sysctl -w net.ipv4.ip_local_port_range="40000 44999"
