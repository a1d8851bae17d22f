"""Files of a table, chosen by its catalog or log rather than by a folder. Runs on the driver.

The log of a Delta table alone says which files of the table's folder are current. `deltalake` reads
only the log, and a store fetches that, so any store's credentials suffice.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from hvd_estimators._util.documents import parse_object
from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators._util.temp_files import folder_prefix
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.types import partition_value, partition_values
from hvd_estimators.exceptions import DataError, StoreError
from hvd_estimators.store.base import Store
from hvd_estimators.store.files import ListedFile

DELTA_LOG = "_delta_log"
"""Name of the folder of a Delta table's log."""

_READABLE = {
    *("columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"),
    *("typeWidening", "typeWidening-preview", "variantType", "variantType-preview"),
}
"""Features of Delta's protocol with which files can be read one by one.

Mapped columns and deletion vectors are errors of their own if a table uses them.
"""


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
    roots : tuple of str
        Folders that contain all files; several if partitions are in other places.
    files : tuple of (ListedFile, dict)
        The files, sorted, each with the partition values in its path.
    rows : mapping of str to int or None
        Path to `TableFile.rows`.
    columns : mapping of str to ColumnSpec
        The needed partition columns, by name.
    """

    table: str
    remedy: str
    roots: tuple[str, ...]
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
        folders: dict[str, list[str]] = {}
        for path in sorted(found):
            folders.setdefault(table_folder(path), []).append(path)
        # Only the chosen partitions of each folder, if they have a folder in common.
        roots = [posixpath.dirname(posixpath.commonprefix(paths)) for paths in folders.values()]
        listed = _versions(store, roots)
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
        return TableFiles(table, remedy, tuple(roots), tuple(files), rows, columns)

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
        listed = _versions(store, self.roots)
        for file, _ in self.files:
            if listed.get(file.path, file) != file:
                raise StoreError(
                    f"{file.path!r} was changed while a model trained on the table {self.table}, "
                    "which may have mixed old and new rows. Train again, and leave the files as "
                    "they are until training ends."
                )


def table_folder(path: str) -> str:
    """Return the folder of a file, without the folders of its partitions."""
    folder = posixpath.dirname(path)
    while "=" in posixpath.basename(folder):
        folder = posixpath.dirname(folder)
    return folder


def _versions(store: Store, roots: Iterable[str]) -> dict[str, ListedFile]:
    return {file.path: file for root in roots for file in store.list_files(root)}


def _equal(spec: ColumnSpec, value: Any, other: Any) -> bool:
    if value is None or spec.dtype == "object":
        return bool(value == other)
    # In the column's type, because a decimal or a 32-bit float differs from its text.
    values = np.array([value, other], spec.dtype)
    return np.array_equal(values[:1], values[1:], equal_nan=True)


@dataclass(frozen=True)
class DeltaLog:
    """The current version of a Delta table.

    Attributes
    ----------
    schema : str
        JSON of the schema, in Spark's format.
    files : mapping of str to TableFile
        Path, relative to the table's folder, to file.
    """

    schema: str
    files: Mapping[str, TableFile]


def read_delta_log(store: Store, table: str) -> DeltaLog:
    """Read the current version of a Delta table.

    Parameters
    ----------
    store : Store
        Reads the log.
    table : str
        Full path of the table's folder.

    Raises
    ------
    StoreError
        If `deltalake` is not installed or cannot read the log. Also if the files cannot be read one
        by one: because of deletion vectors, mapped columns or files of other tables.
    """
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        raise _unreadable(
            table,
            f"only its log says which files are current, and deltalake reads it ({error})",
            f"Run: {INSTALL['deltalake']}",
        ) from error
    from deltalake.exceptions import DeltaError

    with contextlib.ExitStack() as stack:
        try:
            delta = DeltaTable(stack.enter_context(_local_log(store, table)))
            features = set(delta.protocol().reader_features or ())
            mapping = delta.metadata().configuration.get("delta.columnMapping.mode", "none")
            actions = pa.table(delta.get_add_actions()).to_pylist()
        except DeltaError as error:
            raise _unreadable(table, f"deltalake cannot read its log ({error})") from error
        if features - _READABLE:
            raise _unreadable(table, f"it uses {', '.join(sorted(features - _READABLE))}")
        if mapping != "none":
            raise _unreadable(
                table, f"its files name columns otherwise (column mapping by {mapping})"
            )
        if "deletionVectors" in features and _hides_rows(delta):
            raise _unreadable(
                table,
                "deletion vectors hide rows of its files",
                f"Rewrite these files with Spark: REORG TABLE delta.`{table}` APPLY (PURGE).",
            )
        schema = str(delta.schema().to_json())
    files = {}
    for action in actions:
        path = unquote(action["path"])
        if path.startswith("/") or re.match(r"\w+:/", path):
            raise _unreadable(table, f"it reads files of another table ({path!r}), as a clone does")
        files[path] = TableFile(action["num_records"], action.get("partition") or {})
    return DeltaLog(schema, files)


def _hides_rows(delta: Any) -> bool:
    from deltalake.exceptions import DeltaError

    try:
        return any(len(pa.record_batch(batch)) for batch in delta.deletion_vectors())
    except (DeltaError, OSError):
        return True  # the vectors are in files that are not part of the log


def _unreadable(table: str, reason: str, remedy: str = "") -> StoreError:
    train = f'fit(spark.read.format("delta").load("{table}"))'
    beginning = f"{remedy} Or train" if remedy else "Train"
    return StoreError(
        f"{table!r} is a Delta table whose files cannot be read one by one: {reason}. {beginning} "
        f"on its DataFrame: {train}."
    )


@contextlib.contextmanager
def _local_log(store: Store, table: str) -> Iterator[str]:
    """Yield a local folder with the current part of a table's log."""
    local = store.local_path(table)
    if local is not None:
        yield local
        return
    log = f"{table}/{DELTA_LOG}"
    last = store.read_if_exists(f"{log}/_last_checkpoint")
    # Older entries of the log are part of the checkpoint.
    oldest = int(parse_object(last)["version"]) if last else 0
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        for file in store.find(log):
            name = file.removeprefix(f"{log}/")
            number = re.match(r"\d{20}\b", name)
            if number is None or int(number[0]) >= oldest:
                copy = Path(folder, DELTA_LOG, name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(store.read(file))
        yield folder
