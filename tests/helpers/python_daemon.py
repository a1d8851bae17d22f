"""Spark's daemon of Python workers, with the frameworks imported before it forks a worker.

Spark ends a worker that was idle for a minute, and each new one that predicts would import torch or
TensorFlow again.
"""

from __future__ import annotations

import gc
import importlib
import os

from pyspark import daemon

import hvd_estimators  # noqa: F401  lets TensorFlow and torch follow in any order

_IMPORTED = (
    "pandas",
    "pyarrow.parquet",
    "torch",
    "keras",
    "pytorch_lightning",
    "hvd_estimators.torch",
    "hvd_estimators.keras",
    "hvd_estimators.lightning",
)

if __name__ == "__main__":
    # Spark starts one daemon for its pandas functions, which has this variable, and one for tasks
    # of RDDs, which start ranks and do not predict.
    if "SPARK_SIMPLIFIED_TRACEBACK" in os.environ:
        for module in _IMPORTED:
            importlib.import_module(module)
        gc.freeze()
    daemon.manager()
