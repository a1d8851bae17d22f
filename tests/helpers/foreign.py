"""Helpers that read third-party Parquet as the estimators and their readers do."""

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.discovery import first_rows, read_manifest
from hvd_estimators.store import LocalStore


def describe(folder, *names, validation=None, **options):
    store = LocalStore(str(folder.parent))
    return read_manifest(store, str(folder), validation and str(validation), names, **options)


def read(split, specs):
    """Read all rows as a reader does, one row group at a time."""
    names = [name for spec in specs for name in spec.stored_names]
    parts = []
    for group in split.row_groups:
        table = parquet.ParquetFile(group.file).read_row_group(group.index, columns=names)
        parts.append(table_to_columns(table, specs, group.file))
    return {spec.name: np.concatenate([part[spec.name] for part in parts]) for spec in specs}


def load(folder, *names):
    manifest = describe(folder, *names)
    whole = read(manifest.train, manifest.columns)
    # The trial rows for the model are the first training rows.
    store = LocalStore(str(folder.parent))
    specs = {spec.name: spec for spec in manifest.columns}
    for name, array in first_rows(store, manifest, 2).items():
        np.testing.assert_array_equal(array, whole[name][: len(array)])
        assert array.dtype == whole[name].dtype == specs[name].dtype
        assert array.shape[1:] == whole[name].shape[1:] == specs[name].shape
    return whole


def load_one(folder, values, **options):
    folder.mkdir(exist_ok=True)
    parquet.write_table(pa.table({"c": values}), folder / "a.parquet", **options)
    return load(folder, "c")["c"]


def check(array, expected):
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)
