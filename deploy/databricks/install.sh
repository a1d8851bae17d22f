#!/bin/bash
# Cluster-scoped init script: install hvd_estimators for the driver's and all workers' Python.
#
# The runtime's own packages keep their versions, except cloudpickle, of which this package needs
# version 3. (PySpark has its own copy.) The runtime's PySpark is not replaced. Wheels lie in a
# folder of a Unity Catalog volume, beside this script: hvd_estimators, and Horovod if you use it.
# spark_env_vars of the cluster may set:
#
#   HVD_ESTIMATORS_WHEELS   the folder
#   HVD_ESTIMATORS_EXTRAS   extras to install: torch, keras, lightning, separated by commas
set -euo pipefail
wheels="${HVD_ESTIMATORS_WHEELS:-/Volumes/main/default/hvd_estimators}"
extras="${HVD_ESTIMATORS_EXTRAS:-torch}"
python=/databricks/python/bin/python
work="$(mktemp --directory)"

"$python" -m pip list --format=freeze | grep --invert-match '^cloudpickle==' > "$work/runtime.txt"
"$python" -m pip install --no-deps "$wheels"/*.whl

# What hvd_estimators and its extras require, except PySpark.
"$python" - "$extras" > "$work/requirements.txt" <<'EOF_PYTHON'
import importlib.metadata
import sys

from packaging.requirements import Requirement

for text in importlib.metadata.requires("hvd_estimators"):
    requirement = Requirement(text)
    marker, requirement.marker = requirement.marker, None
    chosen = marker is None or any(marker.evaluate({"extra": e}) for e in sys.argv[1].split(","))
    if chosen and requirement.name != "pyspark":
        print(requirement)
EOF_PYTHON

"$python" -m pip install --constraint "$work/runtime.txt" --requirement "$work/requirements.txt"
rm -r "$work"
