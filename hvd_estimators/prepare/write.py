"""Write a dataset in one Spark job, which also converts, checks, splits and measures the rows.

By default, a task has one open file, so Spark sorts rows by the column that selects the file. With
one open file for each side of a split, neither that sort nor the sort of shuffled rows by two
columns is necessary.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from hvd_estimators.data.discovery import complete_shapes, joined, read_split
from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest
from hvd_estimators.exceptions import DataError, StoreError, StoreUnavailableError
from hvd_estimators.prepare.connectors import spark_url, storage_errors
from hvd_estimators.prepare.datasets import manifest_path, split_path
from hvd_estimators.prepare.schema import StoredColumn, inner_lengths, numbered, unused_name
from hvd_estimators.store import Store
from hvd_estimators.store.registry import facts

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROW_GROUP_BYTES = 16 * 2**20
"""Target size of a row group, the unit that readers fetch and shuffle."""

_SPLIT = "is_validation"
"""Column that contains a row's side of the split; Spark names folders after it."""

_SIDES = 3
"""Number of values of that column, including null."""

_EMPTY = "The DataFrame is empty: there are no rows to train on."

_KEY_SEEDS = 2**32
"""Separates the seeds of keys from a split's seeds, to which Spark adds the partition's number."""

_OPTION = "spark.sql.maxConcurrentOutputFileWriters"


class _Setting:
    """An option's value before its first user, and the number of its users, which are threads."""

    def __init__(self) -> None:
        self.users = 0
        self.before: str | None = None


_lock = threading.Lock()
_settings: dict[int, _Setting] = {}


@contextlib.contextmanager
def several_open_files(session: SparkSession, files: int) -> Iterator[None]:
    """Let a task write several files at a time for the duration of the block.

    The option belongs to the session, which other threads share. The last thread that needs the
    option restores it. A larger number that the user has set is not changed.

    Parameters
    ----------
    session : SparkSession
        The session of the written DataFrame.
    files : int
        Number of files.
    """
    conf: Any = session.conf
    with _lock:
        setting = _settings.setdefault(id(session), _Setting())
        setting.users += 1
        if setting.users == 1:
            setting.before = conf.get(_OPTION, None)
        if int(conf.get(_OPTION, None) or 0) < files:
            conf.set(_OPTION, str(files))
    try:
        yield
    finally:
        with _lock:
            setting.users -= 1
            if not setting.users:
                del _settings[id(session)]
                if setting.before is None:
                    conf.unset(_OPTION)
                else:
                    conf.set(_OPTION, setting.before)


@dataclass(frozen=True)
class Validation:
    """Selection of the validation rows.

    Attributes
    ----------
    condition : Column
        True for these rows.
    by_position : bool
        Whether the condition depends on a row's position.
    """

    condition: Column
    by_position: bool = False


@dataclass(frozen=True)
class Shuffle:
    """Random order of the rows.

    Attributes
    ----------
    seed : int
        Determines the order, together with the rows of each partition.
    files : int
        Maximum number of files (on each side of a split); there are fewer if there are few rows.
    """

    seed: int
    files: int


def write_dataset(
    store: Store,
    index: str,
    df: DataFrame,
    columns: Sequence[StoredColumn],
    validation: Validation | None,
    shuffle: Shuffle | None = None,
    *,
    in_order: bool = False,
    check_finite: bool,
) -> DatasetManifest:
    """Write a DataFrame's columns, and finally the manifest, which names the files.

    A single Spark job writes both sides of a split. A row is therefore on one side only, even if a
    task that runs again would choose the other side. Each side is then moved to the path that the
    store reports for it.

    Parameters
    ----------
    store : Store
        Store of the dataset.
    index : str
        Index of the dataset.
    df : DataFrame
        The rows. Unless they are shuffled, one file is written for each partition and each side of
        the split.
    columns : sequence of StoredColumn
        The columns to write.
    validation : Validation, optional
        Selects the validation rows.
    shuffle : Shuffle, optional
        Puts the rows in random order, on each side of the split.
    in_order : bool
        Whether rows come in the same order each time. If they do not, and the result depends on the
        order, they are sorted first. The same rows then give the same files, and a task that runs a
        second time gives the same rows.
    check_finite : bool
        Reject NaN and infinity.

    Raises
    ------
    DataError
        If there are no rows (for training or for validation). Also for nulls, for ragged arrays,
        and with ``check_finite`` for numbers that are not finite.
    StoreError
        If storage fails while Spark writes, or this process does not find all of the rows.
    """

    def write(path: str, *partition_by: str) -> dict[str, Any]:
        frame, observations = _frame(df, columns, validation, shuffle, in_order, check_finite)
        writer = frame.write.option("parquet.block.size", str(ROW_GROUP_BYTES))
        url = spark_url(df.sparkSession, store, path)
        if shuffle is not None and facts(url).renames_by_copy:
            # Tasks move their files into place, and the driver does not move each file a second
            # time. With this algorithm, files of a failed job can be visible, but the manifest
            # covers that. A task that runs again reads the shuffled rows, and so overwrites the
            # files with the same content.
            writer = writer.option("mapreduce.fileoutputcommitter.algorithm.version", "2")
        with contextlib.ExitStack() as stack:
            if partition_by:
                writer = writer.partitionBy(*partition_by)
                stack.enter_context(several_open_files(df.sparkSession, _SIDES))
            stack.enter_context(storage_errors(store, url))
            writer.parquet(url)
        return _measurements(observations)

    if validation is None:
        train_path, val_path = store.get_train_data_path(index), None
        observed = _twice(store, train_path, lambda: write(train_path))
    else:
        path, split = split_path(store, index), _split_name(columns)
        sides = f"{path}/{split}=false", f"{path}/{split}=true"
        observed = _twice(store, path, lambda: write(path, split))
        if observed["split_nulls"]:
            raise DataError(
                f"validation: its column holds {observed['split_nulls']} nulls or NaN; set "
                "true or false, or a number, in every row."
            )
        if not any(map(store.exists, sides)):
            _check_found(path, observed, 0)
        for side, purpose in zip(sides, ("to train on", "to validate on"), strict=True):
            if not store.exists(side):
                raise DataError(
                    f"validation: there are no rows {purpose}. Choose a fraction or a column that "
                    "leaves rows on both sides."
                )
        train_path, val_path = _moved(store, index, sides)
    specs: Sequence[ColumnSpec] = [
        _measured(column.spec, i, observed) for i, column in enumerate(columns)
    ]
    if validation is None and not store.exists(train_path):
        _check_found(train_path, observed, 0)
    train, specs = read_split(store, train_path, specs)
    if not train.rows:
        raise DataError(_EMPTY)
    val = None
    if val_path is not None:
        val, of_val = read_split(store, val_path, specs)
        specs = [
            replace(spec, range=joined(spec.range, other.range))
            for spec, other in zip(specs, of_val, strict=True)
        ]
    _check_found(train_path, observed, train.rows + (val.rows if val is not None else 0))
    shapes = complete_shapes(store, train, specs)
    checksums = str(observed["content"]), str(observed["row_order"])
    manifest = DatasetManifest(shapes, train, val, shuffle is not None, *checksums)
    store.write_text(manifest_path(store, index), manifest.to_json())
    return manifest


def _twice(store: Store, path: str, write: Callable[[], T]) -> T:
    """Write a folder, and once more if the storage was unavailable for a while."""
    try:
        return write()
    except StoreUnavailableError as error:
        logger.warning(
            "%s The rows are written once more as soon as the store is available.", error
        )
    # This is retried until the storage is available again, like every request.
    store.delete(path)
    return write()


def _moved(store: Store, index: str, sides: tuple[str, str]) -> tuple[str, str]:
    """Move both sides of a split to the paths that the store reports, and return these paths."""
    targets = store.get_train_data_path(index), store.get_val_data_path(index)
    for side, target in zip(sides, targets, strict=True):
        store.move_folder(side, target)
    store.delete(split_path(store, index))
    return targets


def _frame(
    df: DataFrame,
    columns: Sequence[StoredColumn],
    validation: Validation | None,
    shuffle: Shuffle | None,
    in_order: bool,
    check_finite: bool,
) -> tuple[DataFrame, list[Observation]]:
    """Return the frame to write, and the observations that measure its rows."""
    stored = [name for column in columns for name in column.spec.stored_names]
    lengths = {i: column.length for i, column in enumerate(columns) if column.length is not None}
    further = [*lengths.values()]
    if validation is not None and not validation.by_position:
        further.append(validation.condition)
    frame = numbered(df, columns, further)
    numbers = [f"c{number}" for number in range(len(stored) + len(further))]
    others, by_column = numbers[len(stored) :], iter(numbers)
    parts = [[next(by_column) for _ in column.spec.stored_names] for column in columns]
    # Maps are hashed as text.
    maps = [name for c, names in zip(columns, parts, strict=True) for name in names if c.has_map]
    hashed = [f"cast({name} as string)" if name in maps else name for name in numbers]
    drawn: list[Column] = []
    length_names = dict(zip(lengths, others, strict=False))
    measures = _measures(columns, parts, length_names, check_finite)
    split = None
    if validation is not None:
        split = "split" if validation.by_position else others[-1]
        if validation.by_position:
            drawn.append(validation.condition.alias(split))
        measures.append(F.count_if(F.col(split).isNull()).alias("split_nulls"))
    if shuffle is not None:
        drawn.append(F.rand(shuffle.seed + _KEY_SEEDS).alias("key"))
    if drawn:
        is_restored = not in_order and shuffle is None
        if is_restored:
            frame = frame.withColumn("given", F.monotonically_increasing_id())
        if not in_order:
            frame = frame.sortWithinPartitions(F.expr(_hash(hashed)))
        frame = frame.select("*", *drawn)
        if is_restored:
            frame = frame.sortWithinPartitions("given").drop("given")
    observations = [Observation()]
    if measures:
        observations.append(Observation())
        frame = frame.observe(observations[-1], *measures)
    frame = frame.drop(*length_names.values())
    if shuffle is not None:
        # The hash of a row's key selects its file, and the key itself its position in the file.
        frame = frame.repartition(shuffle.files, "key").sortWithinPartitions("key").drop("key")
    # Measured in the last stage, because stages of a shuffle count rows of repeated tasks twice.
    content = F.expr(_content(columns, parts, split)).alias("content")
    frame = frame.select("*", content, F.monotonically_increasing_id().alias("position"))
    checksums = {"content": "content", "row_order": _hash(["content", "position"])}
    # Spark does not notice files of tasks on a machine that lacks the store's disk.
    count = F.count(F.lit(1)).alias("rows")
    # Half of each hash, so that the sum over 2**32 rows does not overflow.
    sums = [F.expr(f"sum(shiftright({of}, 32))").alias(name) for name, of in checksums.items()]
    frame = frame.observe(observations[0], count, *sums).drop("content", "position")
    names = stored if validation is None else [*stored, _split_name(columns)]
    return frame.toDF(*names), observations


def _split_name(columns: Sequence[StoredColumn]) -> str:
    """Return a name that no written column has, for the column that selects the side."""
    return unused_name(_SPLIT, [n for column in columns for n in column.spec.stored_names])


def _measures(
    columns: Sequence[StoredColumn],
    parts: Sequence[Sequence[str]],
    lengths: Mapping[int, str],
    check_finite: bool,
) -> list[Column]:
    """Return the aggregates that find nulls, ragged rows and, on request, NaN and infinity."""
    measures = []
    for i, column in enumerate(columns):
        if i in lengths:
            length = F.col(lengths[i])
            # The size of a null is null under ANSI rules, and -1 otherwise.
            measures += [
                F.min(F.when(length >= 0, length)).alias(f"min_{i}"),
                F.max(length).alias(f"max_{i}"),
                F.count_if(length.isNull() | (length < 0)).alias(f"nulls_{i}"),
            ]
        depth = len(column.spec.shape)
        inner = inner_lengths(F.col(parts[i][0]), depth) if depth > 1 else []
        for level, sizes in enumerate(inner, 1):
            measures += [
                F.min(F.array_min(sizes)).alias(f"min_{i}_{level}"),
                F.max(F.array_max(sizes)).alias(f"max_{i}_{level}"),
            ]
        not_finite = column.is_not_finite(parts[i][-1]) if check_finite else None
        if not_finite is not None:
            measures.append(F.count_if(not_finite).alias(f"not_finite_{i}"))
    return measures


def _content(
    columns: Sequence[StoredColumn], parts: Sequence[Sequence[str]], split: str | None
) -> str:
    """Return the SQL expression of a row's hash."""
    hashed = [] if split is None else [split]
    for column, names in zip(columns, parts, strict=True):
        depth = len(column.spec.shape)
        for value in names:
            hashed.append(f"cast({value} as string)" if column.has_map else value)
            if depth:
                hashed.append(f"size({value})")
    return _hash(hashed)


def _hash(parts: Iterable[str]) -> str:
    """Return one SQL expression that hashes several. One call is faster than one for each."""
    return f"xxhash64({', '.join(parts)})"


def _measurements(observations: Iterable[Observation]) -> dict[str, Any]:
    """Return the measurements of the write."""
    observed: dict[str, Any] = {}
    try:
        for observation in observations:
            found = observation.get
            if not found:
                # Spark Connect returns an empty result if there are no rows.
                raise DataError(_EMPTY)
            observed |= found
    except Py4JJavaError as error:
        # Spark 4 asserts that measurements exist. They do not exist if its optimizer detected that
        # there are no rows, and planned an empty frame instead.
        if error.java_exception.getClass().getName() != "java.lang.AssertionError":
            raise
        raise DataError(_EMPTY) from error
    return observed


def _check_found(path: str, observed: dict[str, Any], found: int) -> None:
    """Check that this process finds all rows that Spark has written."""
    written = observed["rows"]
    if found != written:
        raise StoreError(
            f"Spark has written {written} rows to {path!r}, and this process finds {found} of "
            "them: the others are on disks of other machines, with Spark Connect the server's. "
            "Set the store's prefix_path to a folder that this process, the server and all "
            "executors share, or to a URL such as s3://bucket/experiments, and check on each "
            "machine that the folder is mounted."
        )


def _measured(spec: ColumnSpec, i: int, observed: dict[str, Any]) -> ColumnSpec:
    """Check a column against the measurements of the write, and set an array's length."""
    if observed.get(f"not_finite_{i}"):
        raise DataError(
            f"Column {spec.name!r} holds NaN or infinity (as {spec.dtype}) in "
            f"{observed[f'not_finite_{i}']} rows; fill or drop them, or set check_finite=False.",
            column=spec.name,
        )
    if not spec.shape:
        return spec
    if observed[f"nulls_{i}"]:
        raise DataError(
            f"Column {spec.name!r} holds {observed[f'nulls_{i}']} nulls; fill or drop them "
            "before training.",
            column=spec.name,
        )
    if observed[f"min_{i}"] is None:
        return spec
    shape = []
    for level, part in enumerate(["", *(f"_{level}" for level in range(1, len(spec.shape)))]):
        shortest, longest = observed[f"min_{i}{part}"], observed[f"max_{i}{part}"]
        if shortest != longest:
            raise DataError(
                f"Column {spec.name!r} is ragged: its arrays have from {shortest} to {longest} "
                f"elements{' within arrays' if level else ''}. Pad or cut them to one length, or "
                f"set padding={{{spec.name!r}: 0}} or collate_fn, which take rows of any length.",
                column=spec.name,
            )
        # Nulls and empty arrays have no inner lengths, and are found in the files.
        shape.append(-1 if longest is None else int(longest))
    return replace(spec, shape=tuple(shape))
