"""What is known about a prepared dataset, in the form that ``horovod.spark`` returns it.

Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.ml.linalg import DenseVector, SparseVector
from pyspark.sql import types as T

from hvd_estimators.exceptions import StoreError
from hvd_estimators.parquet.manifest import ColumnSpec
from hvd_estimators.prepare.catalog import load_manifest
from hvd_estimators.prepare.reuse import store_of
from hvd_estimators.store import Store

__all__ = ["column_metadata", "get_dataset_properties"]

_TYPES: dict[str, type] = {
    "bool": T.BooleanType,
    "float32": T.FloatType,
    "float64": T.DoubleType,
    "int8": T.ByteType,
    "int16": T.ShortType,
    "int32": T.IntegerType,
    "int64": T.LongType,
    "object": T.StringType,
}
_FORMATS = {"vector": "array", "sparse": "custom_sparse_format"}


def get_dataset_properties(
    dataset_idx: str, store: Store | None = None
) -> tuple[int, int, dict[str, dict[str, Any]], float]:
    """Return what is known about a dataset that `prepare_data` wrote. Runs on the driver.

    Parameters
    ----------
    dataset_idx : str
        What `prepare_data` yielded.
    store : Store, optional
        Where it lies. Default: where this application wrote it.

    Returns
    -------
    train_rows, val_rows : int
        Rows to train and to validate on.
    metadata : dict
        Column to a dict, see `column_metadata`.
    avg_row_size : float
        Bytes of a training row as it is stored, compressed.

    Raises
    ------
    StoreError
        If there is no such dataset.
    """
    store = store or store_of(dataset_idx)
    if store is None:
        raise StoreError(
            f"dataset_idx: this application has not prepared a dataset {dataset_idx!r}, or has "
            "deleted it. Call get_dataset_properties inside the 'with prepare_data(...)' block, or "
            "pass the store that another application wrote to."
        )
    manifest = load_manifest(store, dataset_idx)
    files = {group.file for group in manifest.train.row_groups}
    num_bytes = sum(int(store.fs.size(file)) for file in files)
    return (
        manifest.train.rows,
        manifest.validation.rows if manifest.validation else 0,
        column_metadata(manifest.columns),
        num_bytes / max(manifest.train.rows, 1),
    )


def column_metadata(columns: Iterable[ColumnSpec]) -> dict[str, dict[str, Any]]:
    """Return columns as ``horovod.spark`` describes them.

    Parameters
    ----------
    columns : iterable of ColumnSpec
        The columns as they are stored.

    Returns
    -------
    dict
        Name to a dict of ``spark_data_type`` (a class), ``is_sparse_vector_only``, ``shape`` (of a
        row; empty for a number), ``intermediate_format``, ``max_size`` (numbers in a row) and
        ``dtype`` (NumPy's, which ``horovod.spark`` does not have).
    """
    return {
        column.name: {
            "spark_data_type": _spark_type(column),
            "is_sparse_vector_only": column.kind == "sparse",
            "shape": list(column.shape),
            "intermediate_format": _FORMATS.get(column.kind, "nochange"),
            "max_size": column.width,
            "dtype": column.dtype,
        }
        for column in columns
    }


def _spark_type(column: ColumnSpec) -> type:
    if column.kind == "sparse":
        return SparseVector
    if column.shape:
        return DenseVector
    return _TYPES.get(column.dtype, T.DoubleType)
