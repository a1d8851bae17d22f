"""Files of a table, chosen by its catalog or log rather than by a folder. Runs on the driver."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.types import partition_value, partition_values
from hvd_estimators.exceptions import DataError, StoreError
from hvd_estimators.store.base import Store
from hvd_estimators.store.files import ListedFile


@dataclass(frozen=True)
class TableFile:
    """A file of a table, as the catalog or log describes it.

    Attributes
    ----------
    rows : int or None
        Number of rows that the table shows of the file; None if unknown.
    values : mapping of str to object
        Values of partition columns; None for a null.
    """

    rows: int | None
    values: Mapping[str, Any]


@dataclass(frozen=True)
class TableFiles:
    """The files of a table that a fit reads.

    Attributes
    ----------
    table : str
        The table, for messages.
    remedy : str
        What to do if the files cannot be read one by one.
    root : str
        A folder that contains all files.
    files : tuple of (ListedFile, dict)
        The files, sorted, each with the partition values in its path.
    rows : mapping of str to int or None
        Path to `TableFile.rows`.
    columns : mapping of str to ColumnSpec
        The needed partition columns, by name.
    """

    table: str
    remedy: str
    root: str
    files: tuple[tuple[ListedFile, dict[str, str]], ...]
    rows: Mapping[str, int | None]
    columns: Mapping[str, ColumnSpec]

    @staticmethod
    def find(
        store: Store,
        table: str,
        remedy: str,
        found: Mapping[str, TableFile],
        columns: Mapping[str, ColumnSpec],
    ) -> TableFiles:
        """Look for the files of a table in their store.

        Parameters
        ----------
        store : Store
            Opens the files.
        table, remedy : str
            For messages.
        found : mapping of str to TableFile
            Full path to file; not empty.
        columns : mapping of str to ColumnSpec
            The needed partition columns, by name.

        Raises
        ------
        StoreError
            If a file is missing, or if a path has another partition value than the table.
        """
        root = posixpath.dirname(posixpath.commonprefix(list(found)))
        listed = {file.path: file for file in store.list_files(root)}
        files = []
        for path in sorted(found):
            if path not in listed:
                raise StoreError(
                    f"The table {table} has a file {path!r}, which does not exist. Fit again, if "
                    "the table was changed meanwhile. Otherwise restore the file."
                )
            in_path = partition_values(path)
            for name, spec in columns.items():
                value, told = found[path].values[name], in_path.get(name)
                if told is None or not _equal(spec, value, partition_value(spec, told, path)):
                    raise StoreError(
                        f"The table {table} has the partition value {name}={value!r} in {path!r}, "
                        f"which its path does not tell. {remedy}"
                    )
            files.append((listed[path], in_path))
        rows = {path: file.rows for path, file in found.items()}
        return TableFiles(table, remedy, root, tuple(files), rows, columns)

    def __len__(self) -> int:
        return len(self.files)

    def without(self, other: TableFiles) -> TableFiles | None:
        """Return the files that are not among others; None if there are none."""
        files = tuple(file for file in self.files if file[0].path not in other.rows)
        return replace(self, files=files) if files else None

    def check_rows(self, rows: Mapping[str, int]) -> None:
        """Check that the table shows all rows of its files.

        Parameters
        ----------
        rows : mapping of str to int
            Path to the number of rows in the file's footer.

        Raises
        ------
        DataError
            If it shows fewer, which a deletion vector or a filter on rows can cause.
        """
        for path, in_file in rows.items():
            shown = self.rows[path]
            if shown not in (None, in_file):
                raise DataError(
                    f"The table {self.table} shows {shown} of the {in_file} rows in {path!r}. "
                    f"{self.remedy}"
                )

    def check_unchanged(self, store: Store) -> None:
        """Check that no file has changed since it was listed. Deleted files are ignored.

        Raises
        ------
        StoreError
            If one has another size, and ETag or modification time.
        """
        listed = {file.path: file.version for file in store.list_files(self.root)}
        for file, _ in self.files:
            if listed.get(file.path, file.version) != file.version:
                raise StoreError(
                    f"{file.path!r} was changed while a model trained on the table {self.table}, "
                    "which may have mixed old and new rows. Train again, and leave the files as "
                    "they are until training ends."
                )


def _equal(spec: ColumnSpec, value: Any, other: Any) -> bool:
    if value is None or spec.dtype == "object":
        return bool(value == other)
    # In the column's type, because a decimal or a 32-bit float differs from its text.
    values = np.array([value, other], spec.dtype)
    return np.array_equal(values[:1], values[1:], equal_nan=True)
