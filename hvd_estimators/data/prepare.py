"""DataFrame to Parquet: converted in Spark's JVM, split and written in one pass.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.data.footers import complete_shapes, read_split
from hvd_estimators.data.manifest import MANIFEST_FILE, ColumnSpec, DatasetManifest
from hvd_estimators.data.schema import StoredColumn, require_columns, stored_column
from hvd_estimators.exceptions import ColumnError, DataError, ParamError, StoreError
from hvd_estimators.store import Store

__all__ = ["load_manifest", "prepare_data"]

logger = logging.getLogger(__name__)

ROW_GROUP_BYTES = 16 * 2**20
"""Target size of a row group: the unit that readers fetch and shuffle."""

_SPLIT = "__split"


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Store,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None = None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    random_seed: int | None = None,
) -> Iterator[str]:
    """Write a DataFrame as Parquet files that ranks read; deleted when the block ends.

    Parameters
    ----------
    num_processes : int
        Number of ranks that will train on it.
    store : Store
        Where it is written.
    df : DataFrame
        The rows; evaluated once.
    label_columns, feature_columns, sample_weight_col
        The columns that are written. ``feature_columns=None`` takes all but the others.
    validation : float or str, optional
        The fraction of rows to validate on (chosen at random, by the seed), or the name of a
        column that is true, or above zero, for them.
    compress_sparse : bool
        Write vectors as indices and values of what is not zero.
    partitions_per_process : int
        At most as many files per rank are written.
    verbose : int
        Above zero, logs paths and row counts.
    random_seed : int, optional
        Seed of the split. Default: 0.

    Yields
    ------
    str
        The dataset's index, for ``fit_on_parquet(dataset_idx=…)``.

    Raises
    ------
    ParamError
        If ``validation`` or a number is out of range.
    ColumnError
        If a column is missing or of a type that cannot be trained on.
    DataError
        If there are no rows (to train on, or to validate on), nulls, or ragged arrays.
    StoreError
        If the store cannot be written to.
    """
    _check_numbers(num_processes, partitions_per_process, validation)
    label_columns = list(label_columns or [])
    require_columns(df, "label_columns", label_columns)
    extra = [sample_weight_col] if sample_weight_col else []
    if isinstance(validation, str):
        require_columns(df, "validation", [validation])
    if feature_columns is None:
        left_out = {*label_columns, *extra, validation}
        feature_columns = [name for name in df.columns if name not in left_out]
    require_columns(df, "feature_columns", list(feature_columns))
    require_columns(df, "sample_weight_col", extra) if extra else None
    names = list(dict.fromkeys([*feature_columns, *label_columns, *extra]))
    columns = [stored_column(df, name, compress_sparse=compress_sparse) for name in names]
    if extra and columns[names.index(extra[0])].spec.kind != "scalar":
        raise ColumnError(
            f"sample_weight_col: expected a column of numbers, found {extra[0]!r} of type "
            f"{df.schema[extra[0]].dataType.simpleString()}."
        )
    store.check()
    index = uuid.uuid4().hex[:12]
    try:
        manifest = _write(
            store,
            index,
            df.coalesce(num_processes * partitions_per_process),
            columns,
            _is_validation(df, validation, random_seed or 0),
        )
        logger.log(
            logging.INFO if verbose else logging.DEBUG,
            "Prepared %d training and %d validation rows under %s",
            manifest.train.rows,
            manifest.validation.rows if manifest.validation else 0,
            store.prefix_path,
        )
        yield index
    finally:
        for path in (store.get_train_data_path(index), store.get_val_data_path(index)):
            store.delete(path)


def load_manifest(store: Store, dataset_idx: str) -> DatasetManifest:
    """Read the manifest of a dataset that `prepare_data` wrote.

    Raises
    ------
    StoreError
        If there is no such dataset.
    """
    path = f"{store.get_train_data_path(dataset_idx)}/{MANIFEST_FILE}"
    if not store.exists(path):
        raise StoreError(
            f"dataset_idx: the store holds no prepared dataset {dataset_idx!r} (looked for "
            f"{path!r}). Call fit_on_parquet inside the 'with prepare_data(...)' block."
        )
    return DatasetManifest.from_json(store.read(path).decode())


def _check_numbers(
    num_processes: int, partitions_per_process: int, validation: float | str | None
) -> None:
    if num_processes < 1:
        raise ParamError(f"num_processes: expected 1 or more, found {num_processes}.")
    if partitions_per_process < 1:
        raise ParamError(
            f"partitions_per_process: expected 1 or more, found {partitions_per_process}."
        )
    if validation is None or isinstance(validation, str):
        return
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise ParamError(
            f"validation: expected a fraction or a column's name, found {validation!r}."
        )
    if not 0 <= validation < 1:
        raise ParamError(
            f"validation: expected a fraction from 0 to less than 1, found {validation}."
        )


def _is_validation(df: DataFrame, validation: float | str | None, seed: int) -> Column | None:
    """Return the expression that is true for rows to validate on; None without validation."""
    if not validation:
        return None
    if not isinstance(validation, str):
        return F.rand(seed) < float(validation)
    data_type = df.schema[validation].dataType
    column = df[f"`{validation}`"]
    if isinstance(data_type, T.BooleanType):
        return column
    if isinstance(data_type, T.NumericType):
        return column > 0
    raise ColumnError(
        f"validation: column {validation!r} has type {data_type.simpleString()}; expected a "
        "boolean, or a number that is above zero for rows to validate on."
    )


def _write(
    store: Store,
    index: str,
    df: DataFrame,
    columns: Sequence[StoredColumn],
    is_validation: Column | None,
) -> DatasetManifest:
    expressions = [expression for column in columns for expression in column.expressions]
    measures = _measures(columns)
    if is_validation is not None:
        expressions.append(is_validation.alias(_SPLIT))
        measures.append(F.count_if(F.col(_SPLIT).isNull()).alias("split_nulls"))
    train_path, val_path = store.get_train_data_path(index), store.get_val_data_path(index)
    lengths = [
        c.length.alias(f"__length_{i}") for i, c in enumerate(columns) if c.length is not None
    ]
    frame = df.select(*expressions, *lengths)
    observation = Observation()
    if measures:
        frame = frame.observe(observation, *measures)
    frame = frame.drop(*(name for name in frame.columns if name.startswith("__length_")))
    writer = frame.write.option("parquet.block.size", str(ROW_GROUP_BYTES))
    observed: dict[str, int] = {}
    if is_validation is None:
        writer.parquet(store.spark_url(train_path))
        observed = observation.get if measures else {}
    else:
        staging = f"{train_path}.partial"
        try:
            writer.partitionBy(_SPLIT).parquet(store.spark_url(staging))
            observed = observation.get
            if observed["split_nulls"]:
                raise DataError(
                    f"validation: its column holds {observed['split_nulls']} nulls; set true or "
                    "false in every row."
                )
            _move(store, f"{staging}/{_SPLIT}=false", train_path, "to train on")
            _move(store, f"{staging}/{_SPLIT}=true", val_path, "to validate on")
        finally:
            store.delete(staging)
    specs = [_measured(column.spec, i, observed) for i, column in enumerate(columns)]
    train = read_split(store, train_path, specs)
    if not train.rows:
        raise DataError("The DataFrame is empty: there are no rows to train on.")
    validation = read_split(store, val_path, specs) if is_validation is not None else None
    manifest = DatasetManifest(complete_shapes(store, train, specs), train, validation)
    store.write_text(f"{train_path}/{MANIFEST_FILE}", manifest.to_json())
    return manifest


def _measures(columns: Sequence[StoredColumn]) -> list[Column]:
    """Return the aggregates, taken while writing, that find nulls and ragged rows of arrays."""
    measures = []
    for i, column in enumerate(columns):
        if column.length is not None:
            length = F.col(f"__length_{i}")
            # The size of a null is null under ANSI rules and -1 otherwise.
            measures += [
                F.min(F.when(length >= 0, length)).alias(f"min_{i}"),
                F.max(length).alias(f"max_{i}"),
                F.count_if(length.isNull() | (length < 0)).alias(f"nulls_{i}"),
            ]
    return measures


def _measured(spec: ColumnSpec, i: int, observed: dict[str, int]) -> ColumnSpec:
    """Set the shape of an array column from what was observed while writing."""
    if not spec.shape:
        return spec
    if observed[f"nulls_{i}"]:
        raise DataError(
            f"Column {spec.name!r} holds {observed[f'nulls_{i}']} nulls; fill or drop them "
            "before training."
        )
    shortest, longest = observed[f"min_{i}"], observed[f"max_{i}"]
    if shortest is None:
        return spec
    if shortest != longest:
        raise DataError(
            f"Column {spec.name!r} is ragged: its arrays have from {shortest} to {longest} "
            "elements. Pad or cut them to one length."
        )
    return replace(spec, shape=(int(longest), *spec.shape[1:]))


def _move(store: Store, source: str, target: str, purpose: str) -> None:
    if not store.exists(source):
        raise DataError(
            f"validation: there are no rows {purpose}. Choose a fraction or a column that leaves "
            "rows on both sides."
        )
    store.fs.mv(source, target, recursive=True)
