"""What Parquet footers tell: row groups, nulls, and the columns of files that others wrote."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.columns import Columns, table_to_columns
from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest, RowGroup, Split
from hvd_estimators.exceptions import ColumnError, DataError, StoreError
from hvd_estimators.store.base import Store

__all__ = ["complete_shapes", "first_rows", "read_manifest", "read_split"]

_FOOTER_THREADS = 16


def read_split(store: Store, path: str, columns: Sequence[ColumnSpec]) -> Split:
    """Read the footers of all files under a path.

    Raises
    ------
    StoreError
        If there are no Parquet files.
    ColumnError
        If the files lack a column.
    DataError
        If a column holds nulls.
    """
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        files = _parquet_files(store, path)
        footers = list(pool.map(lambda file: _footer(store, file), files))
    groups = []
    for file, footer in zip(files, footers, strict=True):
        for column in columns:
            _check_column(footer, column, file)
        groups += [
            RowGroup(file, index, footer.row_group(index).num_rows)
            for index in range(footer.num_row_groups)
            if footer.row_group(index).num_rows
        ]
    return Split(path, tuple(groups))


def read_manifest(
    store: Store, train_path: str, val_path: str | None, names: Sequence[str]
) -> DatasetManifest:
    """Describe Parquet files that `prepare_data` did not write.

    Parameters
    ----------
    store : Store
        Opens the files.
    train_path, val_path : str
        Directories of Parquet files; ``val_path`` is None without validation.
    names : sequence of str
        The columns that are needed.

    Raises
    ------
    StoreError, ColumnError, DataError
        See `read_split`; also if the training files hold no rows.
    """
    files = _parquet_files(store, train_path)
    with store.fs.open(files[0], "rb") as file:
        schema = parquet.read_schema(file)
    specs = tuple(_spec(schema, name, files[0]) for name in names)
    train = read_split(store, train_path, specs)
    if not train.rows:
        raise DataError(f"The Parquet files under {train_path!r} hold no rows.")
    specs = complete_shapes(store, train, specs)
    validation = read_split(store, val_path, specs) if val_path else None
    return DatasetManifest(specs, train, validation)


def complete_shapes(
    store: Store, split: Split, specs: Sequence[ColumnSpec]
) -> tuple[ColumnSpec, ...]:
    """Fill in dimensions that are not known yet (-1) from the first row."""
    return tuple(_with_shape(store, split, spec) for spec in specs)


def first_rows(store: Store, manifest: DatasetManifest, rows: int) -> Columns:
    """Return the first rows of the training part, at most as many as its first row group has."""
    table = _first_row_group(store, manifest.train, manifest.columns)
    return table_to_columns(table.slice(0, rows), manifest.columns)


def _parquet_files(store: Store, path: str) -> list[str]:
    if not store.exists(path):
        raise StoreError(f"There is no Parquet dataset at {path!r}.")
    files = sorted(
        file
        for file in store.fs.find(path)
        if not any(part.startswith(("_", ".")) for part in _parts_below(file, path))
    )
    if not files:
        raise StoreError(f"There are no Parquet files under {path!r}.")
    return files


def _parts_below(file: str, path: str) -> list[str]:
    return file[len(path) :].strip("/").split("/") if file != path else []


def _footer(store: Store, file: str) -> parquet.FileMetaData:
    with store.fs.open(file, "rb") as handle:
        return parquet.read_metadata(handle)


def _check_column(footer: parquet.FileMetaData, spec: ColumnSpec, file: str) -> None:
    nulls = 0
    found: set[str] = set()
    for group_index in range(footer.num_row_groups):
        group = footer.row_group(group_index)
        for index in range(group.num_columns):
            column = group.column(index)
            name = _stored_name(column.path_in_schema, spec)
            if name is not None:
                found.add(name)
                # An empty list of a sparse column counts as a null of its leaf.
                if spec.kind != "sparse" and column.statistics is not None:
                    nulls += column.statistics.null_count or 0
    if footer.num_row_groups and len(found) < len(spec.stored_names):
        raise ColumnError(f"The file {file!r} has no column {spec.name!r}.")
    if nulls:
        raise DataError(
            f"Column {spec.name!r} holds {nulls} nulls; fill or drop them before training."
        )


def _stored_name(path: str, spec: ColumnSpec) -> str | None:
    """Return which of a column's stored columns a leaf such as ``name.list.element`` is of."""
    for name in spec.stored_names:
        # A scalar's name can hold dots, and begin like another's.
        if path == name if spec.kind == "scalar" else path.startswith(f"{name}."):
            return name
    return None


def _spec(schema: pa.Schema, name: str, file: str) -> ColumnSpec:
    if name not in schema.names:
        raise ColumnError(
            f"The Parquet files have no column {name!r}; their columns are "
            f"{', '.join(schema.names)} (read from {file!r})."
        )
    leaf, depth = schema.field(name).type, 0
    while _is_list(leaf):
        leaf, depth = leaf.value_type, depth + 1
    if not (pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf)):
        raise ColumnError(
            f"Column {name!r} has type {schema.field(name).type}; expected a number, a boolean or "
            "a list of numbers. Convert it, or leave it out."
        )
    dtype = "bool" if pa.types.is_boolean(leaf) else leaf.to_pandas_dtype().__name__
    return ColumnSpec(name, "array" if depth else "scalar", dtype, (-1,) * depth)


def _is_list(data_type: pa.DataType) -> bool:
    return (
        pa.types.is_list(data_type)
        or pa.types.is_large_list(data_type)
        or pa.types.is_fixed_size_list(data_type)
    )


def _with_shape(store: Store, split: Split, spec: ColumnSpec) -> ColumnSpec:
    if -1 not in spec.shape:
        return spec
    value = _first_row_group(store, split, [spec]).column(spec.name)[0].as_py()
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return replace(spec, shape=tuple(shape))


def _first_row_group(store: Store, split: Split, specs: Sequence[ColumnSpec]) -> pa.Table:
    first = split.row_groups[0]
    names = [name for spec in specs for name in spec.stored_names]
    with store.fs.open(first.file, "rb") as file:
        return parquet.ParquetFile(file).read_row_group(first.index, columns=names)
