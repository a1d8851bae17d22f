"""Files of a table, chosen by its catalog or log rather than by a folder. Runs on the driver.

Only the log of a Delta or Iceberg table says which files of its folder are current. `deltalake`
and `pyiceberg` read only the log, which a store fetches, so any store's credentials suffice.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import posixpath
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias
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

LOG_FOLDERS = {"delta": "_delta_log", "iceberg": "metadata", "hudi": ".hoodie"}
"""Format of a table to the folder of its log."""

_READABLE = {
    *("columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"),
    *("typeWidening", "typeWidening-preview", "variantType", "variantType-preview"),
}
"""Features of Delta's protocol with which files can be read one by one.

Mapped columns and deletion vectors are errors of their own if a table uses them.
"""


@dataclass(frozen=True, eq=False)
class Table:
    """A table, as messages name it and as the columns of files are compared with it.

    Attributes
    ----------
    name : str
        The table.
    remedy : str
        What to do if the files cannot be read one by one.
    ids : mapping of tuple of str to int
        Path of each column and nested field to its number in an Iceberg table. Empty for other
        tables, whose files have the names of its columns.
    """

    name: str
    remedy: str
    ids: Mapping[tuple[str, ...], int] = field(default_factory=dict)


@dataclass(frozen=True)
class TableFile:
    """A file of a table, as the catalog or log describes it.

    Attributes
    ----------
    table : Table
        The table.
    rows : int or None
        Number of rows that the table shows of the file; None if unknown.
    values : mapping of str to object
        Values of partition columns; None for a null.
    problem : str
        Why the file cannot be read as it is; empty if it can.
    """

    table: Table
    rows: int | None
    values: Mapping[str, Any]
    problem: str = ""

    def among(self, listed: Mapping[str, ListedFile], path: str) -> ListedFile:
        """Return the file from those that are listed.

        Raises
        ------
        StoreError
            If it is missing.
        """
        if path not in listed:
            raise StoreError(
                f"The table {self.table.name} has a file {path!r}, which does not exist. Fit "
                "again, if the table was changed meanwhile. Otherwise restore the file."
            )
        return listed[path]

    def check_readable(self, path: str) -> None:
        """Check that the table shows the file as it is.

        Raises
        ------
        DataError
            If it does not.
        """
        if self.problem:
            raise DataError(
                f"The table {self.table.name} {self.problem}: {path!r}. {self.table.remedy}"
            )

    def check_rows(self, path: str, rows: int) -> None:
        """Check that the table shows all rows of the file, given their number in its footer.

        Raises
        ------
        DataError
            If it shows fewer, which a deletion vector or a filter on rows can cause.
        """
        if self.rows not in (None, rows):
            raise DataError(
                f"The table {self.table.name} shows {self.rows} of the {rows} rows in {path!r}. "
                f"{self.table.remedy}"
            )


DataFile: TypeAlias = tuple[ListedFile, dict[str, str], "TableFile | None"]
"""A file, the partition values in its path, and what its table says of it."""


@dataclass(frozen=True)
class TableFiles:
    """The files of a table that a fit reads.

    Attributes
    ----------
    roots : tuple of str
        Folders that contain all files; several if partitions are in other places.
    files : tuple of DataFile
        The files, sorted.
    columns : mapping of str to ColumnSpec
        The partition columns that have their values from paths, by name.
    """

    roots: tuple[str, ...]
    files: tuple[DataFile, ...]
    columns: Mapping[str, ColumnSpec]

    @staticmethod
    def find(
        store: Store,
        found: Mapping[str, TableFile],
        columns: Mapping[str, ColumnSpec],
        *,
        is_one_folder: bool,
    ) -> TableFiles:
        """Look for the files of a table in their store.

        Parameters
        ----------
        store : Store
            Opens the files.
        found : mapping of str to TableFile
            Full path to file; not empty.
        columns : mapping of str to ColumnSpec
            See `TableFiles.columns`.
        is_one_folder : bool
            The table has one folder. False if its partitions may be anywhere.

        Raises
        ------
        StoreError
            If a file is missing, or if a path has another partition value than the table.
        """
        folders: dict[str, list[str]] = {}
        for path in sorted(found):
            folders.setdefault("" if is_one_folder else table_folder(path), []).append(path)
        # Only the chosen partitions of each folder, if they have a folder in common.
        roots = [posixpath.dirname(posixpath.commonprefix(paths)) for paths in folders.values()]
        listed = {file.path: file for root in roots for file in store.list_files(root)}
        files = []
        for path in sorted(found):
            file, in_path = found[path], partition_values(path)
            for name, spec in columns.items():
                value, told = file.values[name], in_path.get(name)
                if told is None or not _equal(spec, value, partition_value(spec, told, path)):
                    raise StoreError(
                        f"The table {file.table.name} has the partition value {name}={value!r} in "
                        f"{path!r}, which its path does not tell. {file.table.remedy}"
                    )
            files.append((file.among(listed, path), in_path, file))
        return TableFiles(tuple(roots), tuple(files), columns)

    def __len__(self) -> int:
        return len(self.files)

    def without(self, other: TableFiles) -> TableFiles | None:
        """Return the files that are not among others; None if there are none."""
        others = {file.path for file, _, _ in other.files}
        files = tuple(file for file in self.files if file[0].path not in others)
        return replace(self, files=files) if files else None


def table_folder(path: str) -> str:
    """Return the folder of a file, without the folders of its partitions."""
    folder = posixpath.dirname(path)
    while "=" in posixpath.basename(folder):
        folder = posixpath.dirname(folder)
    return folder


def _equal(spec: ColumnSpec, value: Any, other: Any) -> bool:
    if value is None or spec.dtype == "object":
        return bool(value == other)
    # In the column's type, because a decimal or a 32-bit float differs from its text.
    values = np.array([value, other], spec.dtype)
    return np.array_equal(values[:1], values[1:], equal_nan=True)


@dataclass(frozen=True)
class TableLog:
    """The current version of a Delta or Iceberg table.

    Attributes
    ----------
    schema : str
        JSON of a schema, in Spark's format, with the partition columns.
    files : mapping of str to TableFile
        Full path to file.
    has_columns : bool
        The files also store the partition columns.
    """

    schema: str
    files: Mapping[str, TableFile]
    has_columns: bool


def read_log(
    store: Store, kind: str, path: str, frame: str = "", snapshot: int | None = None
) -> TableLog:
    """Read the current version of a table.

    Parameters
    ----------
    store : Store
        Reads the log.
    kind : str
        ``"delta"`` or ``"iceberg"``.
    path : str
        Full path of the table's folder.
    frame : str
        The table's DataFrame, in Python, for messages. Default: Spark reads the folder.
    snapshot : int, optional
        Number of the current snapshot of an Iceberg table. Default: the one in its newest metadata.

    Raises
    ------
    StoreError
        If the package that reads the log is not installed or cannot read it. Also if no file of the
        table can be read as it is: because of Delta's deletion vectors and mapped columns, or
        because files are outside the table's folder.
    """
    frame = frame or f'spark.read.format("{kind}").load("{path}")'
    table = Table(path, f"Train on its DataFrame: fit({frame}).")
    try:
        if kind == "delta":
            return _read_delta(store, table)
        return _read_iceberg(store, table, snapshot)
    except ImportError as error:
        package = {"delta": "deltalake", "iceberg": "pyiceberg"}[kind]
        raise _unreadable(
            table,
            f"only its log says which files are current, and {package} reads it ({error})",
            f"Run: {INSTALL[package]}. Or train",
        ) from error


def _unreadable(table: Table, reason: str, beginning: str = "Train") -> StoreError:
    remedy = table.remedy.replace("Train", beginning, 1)
    return StoreError(
        f"{table.name!r} is a table whose files cannot be read one by one: {reason}. {remedy}"
    )


def _read_delta(store: Store, table: Table) -> TableLog:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    with contextlib.ExitStack() as stack:
        try:
            delta = DeltaTable(stack.enter_context(_local_log(store, table.name)))
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
                "Rewrite these files with Spark: REORG TABLE "
                f"delta.`{table.name}` APPLY (PURGE). Or train",
            )
        schema = str(delta.schema().to_json())
    files = {}
    for action in actions:
        path = unquote(action["path"])
        if path.startswith("/") or re.match(r"\w+:/", path):
            raise _unreadable(table, f"it reads files of another table ({path!r}), as a clone does")
        file = TableFile(table, action["num_records"], action.get("partition") or {})
        files[f"{table.name}/{path}"] = file
    return TableLog(schema, files, has_columns=False)


def _hides_rows(delta: Any) -> bool:
    from deltalake.exceptions import DeltaError

    try:
        return any(len(pa.record_batch(batch)) for batch in delta.deletion_vectors())
    except (DeltaError, OSError):
        return True  # the vectors are in files that are not part of the log


@contextlib.contextmanager
def _local_log(store: Store, table: str) -> Iterator[str]:
    """Yield a local folder with the current part of a table's log."""
    local = store.local_path(table)
    if local is not None:
        yield local
        return
    log = f"{table}/{LOG_FOLDERS['delta']}"
    last = store.read_if_exists(f"{log}/_last_checkpoint")
    # Older entries of the log are part of the checkpoint.
    oldest = int(parse_object(last)["version"]) if last else 0
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        for file in store.find(log):
            name = file.removeprefix(f"{log}/")
            number = re.match(r"\d{20}\b", name)
            if number is None or int(number[0]) >= oldest:
                copy = Path(folder, LOG_FOLDERS["delta"], name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(store.read(file))
        yield folder


_MANIFEST_THREADS = 16

_SPARK_TYPES = {
    **{name: name for name in ("boolean", "long", "float", "double", "string", "date", "binary")},
    **{"int": "integer", "timestamp": "timestamp_ntz", "timestamptz": "timestamp"},
}
"""Iceberg's type of a partition column to Spark's."""


def _read_iceberg(store: Store, table: Table, snapshot: int | None) -> TableLog:
    # This needs no PyArrow, of which pyiceberg's other parts ask for a new version.
    from pyiceberg.exceptions import ValidationError
    from pyiceberg.io import FileIO, InputFile
    from pyiceberg.manifest import DataFileContent
    from pyiceberg.serializers import FromInputFile

    class File(InputFile):
        def __len__(self) -> int:
            return store.size(inside(self.location))

        def exists(self) -> bool:
            return True

        def open(self, seekable: bool = True) -> Any:
            return io.BytesIO(store.read(inside(self.location)))

    class Files(FileIO):
        def new_input(self, location: str) -> InputFile:
            return File(location)

        def new_output(self, location: str) -> Any:
            raise NotImplementedError

        def delete(self, location: Any) -> None:
            raise NotImplementedError

    folder = table.name

    def inside(location: str) -> str:
        """Return the path in the store of a file in the table's folder."""
        if not location.startswith(f"{folder}/"):
            raise _unreadable(table, f"{location!r} is outside its folder ({folder!r})")
        return f"{table.name}{location.removeprefix(folder)}"

    try:
        metadata = FromInputFile.table_metadata(File(_newest_metadata(store, table)))
        folder = metadata.location.rstrip("/")
        table = replace(table, ids=dict(_ids((), metadata.schema().as_struct())))
        current = metadata.current_snapshot()
        if snapshot is not None:
            current = metadata.snapshot_by_id(snapshot)
            if current is None:
                raise _unreadable(table, f"its metadata lacks the current snapshot, {snapshot}")
        manifests = [] if current is None else current.manifests(Files())
        with ThreadPoolExecutor(_MANIFEST_THREADS) as pool:
            read = pool.map(lambda manifest: manifest.fetch_manifest_entry(Files()), manifests)
            entries = [
                (manifest.partition_spec_id, entry)
                for manifest, found in zip(manifests, read, strict=True)
                for entry in found
            ]
    except (ValidationError, ValueError, KeyError, EOFError) as error:
        raise _unreadable(table, f"pyiceberg cannot read its metadata ({error})") from error

    kinds, places = _identity_columns(metadata, {spec for spec, _ in entries})
    hidden = _hidden_until(entries)
    files = {}
    for spec, entry in entries:
        file = entry.data_file
        if file.content != DataFileContent.DATA:
            continue
        values = {n: _value(file.partition[places[spec][n]], kind) for n, kind in kinds.items()}
        until = max(hidden.get((), -1), hidden.get(_partition(spec, file), -1))
        problem = ""
        if until >= (entry.sequence_number or 0):
            problem = (
                "hides rows by delete files (Spark rewrites the files: CALL "
                "system.rewrite_data_files, with the option 'delete-file-threshold' = '1')"
            )
        elif file.file_format.value.lower() != "parquet":
            problem = f"has a file of the format {file.file_format.value}"
        files[inside(file.file_path)] = TableFile(table, file.record_count, values, problem)
    fields = [
        {"name": n, "type": _SPARK_TYPES.get(kind, kind), "nullable": True, "metadata": {}}
        for n, kind in kinds.items()
    ]
    return TableLog(json.dumps({"type": "struct", "fields": fields}), files, has_columns=True)


def _identity_columns(
    metadata: Any, specs: Iterable[int]
) -> tuple[dict[str, str], dict[int, dict[str, int]]]:
    """Return the partition columns that some specs of an Iceberg table share.

    Returns
    -------
    dict of str to str
        Name to Iceberg's type.
    dict of int to dict of str to int
        Spec to the places of its columns in partitions.
    """
    from pyiceberg.transforms import IdentityTransform

    columns = {column.field_id: column for column in metadata.schema().fields}
    kinds: dict[str, str] = {}
    places: dict[int, dict[str, int]] = {spec: {} for spec in specs}
    for spec, by_name in places.items():
        for place, by in enumerate(metadata.specs()[spec].fields):
            column = columns.get(by.source_id)
            if column is None or not isinstance(by.transform, IdentityTransform):
                continue
            kind = str(column.field_type)
            if kind in _SPARK_TYPES or kind.startswith("decimal"):
                kinds[column.name], by_name[column.name] = kind, place
    shared = {n: kind for n, kind in kinds.items() if all(n in each for each in places.values())}
    return shared, places


def _hidden_until(entries: Iterable[tuple[int, Any]]) -> dict[tuple[Any, ...], int]:
    """Map each partition with delete files to the last commit whose data files they change."""
    from pyiceberg.manifest import DataFileContent

    hidden: dict[tuple[Any, ...], int] = {}
    for spec, entry in entries:
        file = entry.data_file
        if file.content != DataFileContent.DATA:
            # Only lists of positions are for files of the same commit, too.
            is_older = file.content == DataFileContent.EQUALITY_DELETES
            where, last = _partition(spec, file), (entry.sequence_number or 0) - is_older
            hidden[where] = max(last, hidden.get(where, -1))
    return hidden


def _partition(spec: int, file: Any) -> tuple[Any, ...]:
    """Return the partition of a file of Iceberg; empty if its spec has none."""
    values = [file.partition[place] for place in range(len(file.partition))]
    return (spec, *values) if values else ()


def _value(stored: Any, kind: str) -> Any:
    """Return the value of a partition column of Iceberg."""
    if stored is None or kind not in ("date", "timestamp", "timestamptz"):
        return stored
    if kind == "date":
        return datetime.date(1970, 1, 1) + datetime.timedelta(stored)
    zone = datetime.UTC if kind == "timestamptz" else None
    return datetime.datetime(1970, 1, 1, tzinfo=zone) + datetime.timedelta(microseconds=stored)


def _ids(path: tuple[str, ...], kind: Any) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the path and number of each field of a type of Iceberg."""
    names = ("element_field", "key_field", "value_field")
    nested = [getattr(kind, name, None) for name in names]
    for each in getattr(kind, "fields", nested):
        if each is not None:
            below = (*path, each.name)
            yield below, each.field_id
            yield from _ids(below, each.field_type)


def _newest_metadata(store: Store, table: Table) -> str:
    """Return the path of the metadata of an Iceberg table's current version."""
    folder = f"{table.name}/{LOG_FOLDERS['iceberg']}"
    names = store.names(folder)
    numbers: dict[int, list[str]] = {}
    for name in names:
        found = re.match(r"(v?)(\d+)\b.*\.metadata\.json", name)
        if found:
            numbers.setdefault(int(found[2]), []).append(name)
    hint = ""
    if "version-hint.text" in names:
        hint = store.read(f"{folder}/version-hint.text").decode().strip()
    version = max(numbers, default=0)
    if hint.isdecimal():
        # It is written after the metadata.
        version = int(hint)
        while version + 1 in numbers:
            version += 1
    elif hint:
        numbers = {version: [f"{hint.removesuffix('.metadata.json')}.metadata.json"]}
    newest = numbers.get(version, [])
    if len(newest) != 1 or newest[0] not in names:
        which = " or ".join(newest) or "nothing"
        raise _unreadable(table, f"only its catalog says which metadata is current ({which})")
    return f"{folder}/{newest[0]}"
