"""Dataset discovery from Parquet footers: row groups, nulls and column types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pyarrow as pa

from hvd_estimators.data.arrays import Columns, first_row_shape, table_to_columns
from hvd_estimators.data.exact import Range, common_dtype
from hvd_estimators.data.footers import (
    FileColumns,
    FileFooter,
    Spread,
    damage_is_store_error,
    read_footers,
)
from hvd_estimators.data.manifest import (
    ColumnSpec,
    DatasetManifest,
    RowGroup,
    RowRange,
    Split,
    stored_names,
)
from hvd_estimators.data.remote_reads import (
    OPEN_BYTES,
    RangeFiles,
    RangeRead,
    decoded_bytes,
    open_bytes,
)
from hvd_estimators.data.tables import TableFiles
from hvd_estimators.data.types import (
    TextColumns,
    check_partition,
    column_spec,
    partition_spec,
    text_options,
)
from hvd_estimators.exceptions import ColumnError, DataError, listed
from hvd_estimators.store.base import Store

_NO_NULLS: Mapping[str, int] = {}

_HEAD_BYTES = 16 * 2**20
"""Bytes of a row group that are fetched at once for its first rows; of a larger one, some pages."""

_PAGES_SHARE = 32
"""Part of the memory for row groups that these pages may take."""


def read_split(
    store: Store, path: str, columns: Sequence[ColumnSpec]
) -> tuple[Split, tuple[ColumnSpec, ...]]:
    """Read the footers of all files under a path; also return the columns with their ranges.

    Files and folders whose names begin with ``_`` or ``.`` and ``.crc`` files are ignored. Files
    and row groups without rows may lack the columns.

    Raises
    ------
    StoreError
        If there are no Parquet files, or if a file is not Parquet.
    ColumnError
        If the files lack a column.
    DataError
        If a column contains nulls. Nulls that the footers do not record are detected when rows are
        read.
    """
    files = read_footers(store, path, select=_DataFile.selecting(stored_names(columns)))
    return _split(path, files, columns), _with_ranges(columns, files, stored_names(columns))


def read_manifest(
    store: Store,
    train_path: str | TableFiles | Sequence[str],
    val_path: str | TableFiles | Sequence[str] | None,
    names: Sequence[str],
    *,
    allow_text: TextColumns = False,
    spread: Spread[Any] | None = None,
) -> DatasetManifest:
    """Describe Parquet files that were not written by `prepare_data`.

    Parameters
    ----------
    store : Store
        Opens the files.
    train_path, val_path : str, sequence of str or TableFiles
        Directories of Parquet files, single files, or the files of a table. ``val_path`` is None or
        empty without validation.
    names : sequence of str
        The required columns. A column that is not in the files is looked up in the paths, as a Hive
        partition.
    allow_text : bool or mapping
        Also accept string and bytes columns. True accepts all of them. A mapping accepts its keys,
        see `TextColumns`.
    spread : callable, optional
        See `read_footers`.

    Returns
    -------
    DatasetManifest
        With the smallest types that hold the columns of all files.

    Raises
    ------
    StoreError, ColumnError, DataError
        See `read_split`. Also if the training files contain no rows, if a type is not supported, or
        if no type holds the numbers of two files.
    """
    train_paths, val_paths = _listed(train_path), _listed(val_path or ())
    select = _DataFile.selecting(names)
    train = read_footers(store, *train_paths, select=select, spread=spread)
    validation = read_footers(store, *val_paths, select=select, spread=spread)
    with_rows = [file for file in [*train, *validation] if file.rows]
    for paths, files in ((train_paths, train), (val_paths, validation)):
        if paths and not any(file.rows for file in files):
            roots = ", ".join(repr(_root(path)) for path in paths)
            raise DataError(f"The Parquet files under {roots} hold no rows.")
    # Validation rows are read like training rows, so one type must hold both.
    known = train_path.columns if isinstance(train_path, TableFiles) else {}
    found = [_spec(with_rows, name, allow_text, known.get(name)) for name in names]
    specs = _with_ranges(found, with_rows, names)
    train_split = _split(_root(train_paths[0]), train, specs)
    val_split = _split(_root(val_paths[0]), validation, specs) if val_paths else None
    return DatasetManifest(complete_shapes(store, train_split, specs), train_split, val_split)


def _listed(paths: str | TableFiles | Sequence[str]) -> list[str | TableFiles]:
    return [paths] if isinstance(paths, (str, TableFiles)) else list(paths)


def _root(path: str | TableFiles) -> str:
    return path if isinstance(path, str) else path.roots[0]


def complete_shapes(
    store: Store, split: Split, specs: Sequence[ColumnSpec]
) -> tuple[ColumnSpec, ...]:
    """Replace unknown dimensions (-1) by the first row's.

    Raises
    ------
    DataError
        If the first row contains a null or an empty list in such a column.
    """
    unknown = [spec for spec in specs if -1 in spec.shape]
    if not unknown:
        return tuple(specs)
    row = _head(store, split, unknown, 1)
    return tuple(
        replace(spec, shape=first_row_shape(row, spec)) if spec in unknown else spec
        for spec in specs
    )


def first_rows(store: Store, manifest: DatasetManifest, rows: int) -> Columns:
    """Return the first rows of the training part, at most one row group.

    Only the pages of these rows are read.
    """
    table = _head(store, manifest.train, manifest.columns, rows)
    return table_to_columns(table, manifest.columns, manifest.train.row_groups[0].file)


@dataclass(frozen=True)
class _DataFile:
    """Part of a file's footer, for planning.

    Attributes
    ----------
    file : str
        Full path in the store.
    columns : FileColumns
        All columns of the file.
    partitions : mapping of str to str
        See `FileFooter.partitions`.
    rows : int
        Number of rows.
    row_groups : tuple of RowGroup
        The row groups that have rows.
    nulls : mapping of str to int
        Number of nulls by column, of the selected columns that have nulls, as far as the writer
        recorded them.
    lows, highs : tuple
        Smallest and largest number of each selected column that one Parquet column stores. None if
        the writer did not record them for all row groups.
    """

    file: str
    columns: FileColumns
    partitions: Mapping[str, str]
    rows: int
    row_groups: tuple[RowGroup, ...]
    nulls: Mapping[str, int]
    lows: tuple[Any, ...]
    highs: tuple[Any, ...]

    @staticmethod
    def selecting(names: Iterable[str]) -> Callable[[FileFooter], _DataFile]:
        """Return a function that keeps the given stored columns of a footer."""
        selected = tuple(names)
        placed: dict[FileColumns, list[tuple[int, range]]] = {}

        def select(footer: FileFooter) -> _DataFile:
            columns, metadata = footer.columns, footer.metadata
            if columns not in placed:
                if footer.table is not None and footer.table.ids:
                    columns.check(footer.file, footer.table, selected)
                # The positions of the Parquet columns that store the given columns.
                leaves = [columns.leaves.get(name, range(0)) for name in selected]
                placed[columns] = list(enumerate(leaves))
            nulls: dict[str, int] = {}
            # Flat, because Python's garbage collector visits each container of many files.
            lows: list[Any] = [None] * len(selected)
            highs = lows.copy()
            groups: list[RowGroup] = []
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                if not group.num_rows:
                    continue
                size = num_bytes = 0
                for column, positions in placed[columns]:
                    for position in positions:
                        chunk = group.column(position)
                        size += open_bytes(chunk)
                        num_bytes += decoded_bytes(chunk, metadata, position)
                        statistics = chunk.statistics
                        if statistics is not None and (count := statistics.null_count):
                            name = selected[column]
                            nulls[name] = nulls.get(name, 0) + count
                        if len(positions) == 1:
                            ends = _range(statistics)
                            if groups:
                                known = lows[column] is not None
                                ends = joined(
                                    (lows[column], highs[column]) if known else None, ends
                                )
                            lows[column], highs[column] = ends or (None, None)
                sizes = size, footer.checksum, num_bytes
                groups.append(RowGroup(footer.file, index, group.num_rows, *sizes))
            return _DataFile(
                *(footer.file, columns, footer.partitions, metadata.num_rows, tuple(groups)),
                *(nulls or _NO_NULLS, tuple(lows), tuple(highs)),
            )

        return select

    def has_column(self, name: str) -> bool:
        """Return whether the file contains a column; raise `ColumnError` for duplicate names."""
        count = self.columns.counts[name]
        if count > 1:
            raise ColumnError(
                f"The file {self.file!r} holds {count} columns named {name!r}; expected one. "
                "Rename the others.",
                column=name,
            )
        return bool(count)

    def type(self, name: str) -> pa.DataType:
        """Return a column's Arrow type."""
        return self.columns.schema.field(name).type


def _range(statistics: Any) -> Range | None:
    """Return the range that a footer's entry for a column states; None if it states none."""
    if statistics is None or not statistics.has_min_max:
        return None
    try:
        ends = statistics.min, statistics.max
    except NotImplementedError:
        return None  # for some types that hold no numbers
    for end in ends:
        if not isinstance(end, (int, float, Decimal)) or not math.isfinite(end):
            return None
    return ends


def joined(first: Range | None, second: Range | None) -> Range | None:
    """Return the range of two ranges; None if one is unknown."""
    if first is None or second is None:
        return None
    return _range_of((first[0], second[0]), (first[1], second[1]))


def _range_of(lows: Sequence[Any], highs: Sequence[Any]) -> Range | None:
    if not lows or None in lows:
        return None
    ends = min(lows), max(highs)
    # The manifest is JSON, which has no decimals.
    if isinstance(ends[0], Decimal) or isinstance(ends[1], Decimal):
        return int(ends[0]), int(ends[1])
    return ends


def _with_ranges(
    specs: Sequence[ColumnSpec], files: Iterable[_DataFile], names: Sequence[str]
) -> tuple[ColumnSpec, ...]:
    """Return columns with the ranges of their numbers in all files, which selected some names."""
    files = [file for file in files if file.rows]
    lows = zip(*(file.lows for file in files), strict=True)
    highs = zip(*(file.highs for file in files), strict=True)
    ranges = dict(zip(names, map(_range_of, lows, highs), strict=False))
    made = []
    for spec in specs:
        if len(spec.stored_names) == 1:
            spec = replace(spec, range=ranges.get(spec.stored_names[0]))
        made.append(spec)
    return tuple(made)


def _split(path: str, files: Sequence[_DataFile], specs: Sequence[ColumnSpec]) -> Split:
    groups: list[RowGroup] = []
    checked: set[FileColumns] = set()
    partitions = [spec for spec in specs if spec.kind == "partition"]
    for file in files:
        if not file.rows:
            continue  # writers may choose other column types for an empty frame
        if file.columns not in checked:
            checked.add(file.columns)
            for spec in specs:
                _check_columns(file, spec)
        for spec in partitions:
            check_partition(spec, file.partitions, file.file)
        if file.nulls:
            for spec in specs:
                _reject_nulls(file, spec)
        groups += file.row_groups
    return Split(path, tuple(groups))


def _reject_nulls(file: _DataFile, spec: ColumnSpec) -> None:
    """Raise an error if a column has nulls."""
    if spec.kind in ("sparse", "any"):
        return  # An empty list counts as a null of its leaf, and any types may have nulls.
    for name in spec.stored_names:
        count = file.nulls.get(name)
        if count:
            kind = "nulls or empty lists" if spec.shape else "nulls"
            raise DataError(
                f"Column {spec.name!r} holds {count} {kind} in {file.file!r}; fill or drop them "
                "before training.",
                column=spec.name,
            )


def _check_columns(file: _DataFile, spec: ColumnSpec) -> None:
    """Check that a file has a column."""
    if spec.kind == "partition":
        if file.has_column(spec.name):
            raise ColumnError(
                f"The file {file.file!r} holds a column {spec.name!r}, which other files have in "
                "their path only. Write it into all of them, or into none.",
                column=spec.name,
            )
        return
    for name in spec.stored_names:
        if not file.has_column(name):
            raise ColumnError(
                f"The file {file.file!r} has no column {spec.name!r}; its columns are "
                f"{listed(file.columns.schema.names)}. Write the file again with it, or move "
                "it away.",
                column=spec.name,
            )


def _spec(
    files: Sequence[_DataFile], name: str, allow_text: TextColumns, known: ColumnSpec | None = None
) -> ColumnSpec:
    """Return a column with the smallest type that holds its numbers in all files.

    ``known`` is a partition column of a table.
    """
    first = files[0]
    if known is not None or not first.has_column(name):
        if name not in first.partitions:
            raise ColumnError(
                f"The Parquet files have no column {name!r}; their columns are "
                f"{listed([*first.columns.schema.names, *first.partitions])} "
                f"(read from {first.file!r}).",
                column=name,
            )
        # `check_partition` later reports files without a value.
        values = {f.file: f.partitions[name] for f in files if name in f.partitions}
        return partition_spec(name, values, known)
    options = text_options(allow_text, name)
    spec, wide = column_spec(name, first.type(name), first.file, **options), first
    by_columns = {file.columns: file for file in reversed(files)}
    for file in by_columns.values():
        # `_check_columns` later reports files without the column.
        if not file.has_column(name) or file.type(name) == wide.type(name):
            continue
        other = column_spec(name, file.type(name), file.file, **options)
        dtype = common_dtype(spec.dtype, other.dtype)
        is_shaped = len(spec.shape) == len(other.shape) and all(
            a == b or -1 in (a, b) for a, b in zip(spec.shape, other.shape, strict=True)
        )
        if dtype is None or not is_shaped:
            raise ColumnError(
                f"Column {name!r} has type {file.type(name)} in {file.file!r}, but type "
                f"{wide.type(name)} in {wide.file!r}. Write all files with one type, or with types "
                "of which one holds all numbers of the others.",
                column=name,
            )
        if dtype != spec.dtype:
            wide = file
        spec = replace(spec, dtype=dtype, is_whole=spec.is_whole and other.is_whole)
    return spec


def _head(store: Store, split: Split, specs: Sequence[ColumnSpec], rows: int) -> pa.Table:
    """Read only the first rows of the first row group."""
    first, names = split.row_groups[0], stored_names(specs)
    with damage_is_store_error(first.file), RangeFiles(store, specs) as files:
        chunks = files.footers.get(first.file).chunks(first.index, names)
        size = sum(stop - start for start, stop in chunks)
        share = OPEN_BYTES // max(size, 1) if size <= _HEAD_BYTES else _PAGES_SHARE
        read = RangeRead(RowRange(first.file, first.index, 0, first.rows), group_size=share)
        with files.open(read) as file:
            batches = file.iter_batches(rows, row_groups=[first.index], columns=names)
            return pa.Table.from_batches([next(batches)])
