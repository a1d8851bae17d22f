"""`horovod.spark` from Horovod 0.28.1, with the minimal patches to run here."""

from __future__ import annotations

import functools
import os
import types
import warnings
from typing import Any

import torch
from pyspark.sql import types as T

# It imports TensorFlow and, through Petastorm, uses deprecated features of PyArrow 14. Both print
# many warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
warnings.simplefilter("ignore", FutureWarning)

import horovod.spark.common.store as horovod_store  # noqa: E402
from horovod.spark.common.backend import SparkBackend  # noqa: E402
from horovod.spark.torch import TorchEstimator, TorchModel  # noqa: E402
from pyarrow import parquet  # noqa: E402

__all__ = ["QUIET", "SparkBackend", "TorchEstimator", "make_model", "make_store"]

QUIET = {"PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
"""Environment variables that keep each of the baseline's ranks from printing a page of warnings."""


def make_store(prefix: str) -> Any:
    """Return the baseline's Store for a local folder."""
    # It reads attributes of PyArrow's legacy datasets, which are no longer the default.
    horovod_store.pq = types.SimpleNamespace(
        ParquetDataset=functools.partial(parquet.ParquetDataset, use_legacy_dataset=True)
    )
    return horovod_store.Store.create(prefix)


def make_model(net: torch.nn.Module, width: int) -> TorchModel:
    """Return the baseline's TorchModel as `fit` would, with the given weights."""
    return TorchModel(
        model=net,
        feature_columns=["features"],
        label_columns=["label"],
        input_shapes=[[-1, width]],
        _metadata={"label": {"spark_data_type": T.DoubleType}},
    )
