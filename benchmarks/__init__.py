"""Measures the package against `horovod.spark` and against plain Horovod."""

import os

# Before Spark starts, which hands it on to its tasks: without it, the `horovod.spark` in our build
# of Horovod only says where to go.
os.environ["HVD_ESTIMATORS_HOROVOD_SPARK"] = "1"
