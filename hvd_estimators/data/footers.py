"""Parquet files of a dataset and their footers, each read once by a process.

PyArrow's dataset discovery is not used for this. It cannot be told that ``_day=3`` is a partition
and no hidden folder, as Spark writes it, and it guesses types for partitions (32-bit integers, or
text where a number has a fraction) without saying which file has which value.

Runs on both sides.
"""

from __future__ import annotations

import contextlib
import posixpath
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.partitions import partition_values
from hvd_estimators.data.remote_reads import Range
from hvd_estimators.data.types import num_leaves
from hvd_estimators.exceptions import ColumnError, StoreError
from hvd_estimators.store.base import Store

__all__ = [
    "TAIL_BYTES",
    "DataFile",
    "FileFooter",
    "Footer",
    "FooterCache",
    "data_files",
    "leaf_positions",
    "read_footers",
    "read_tail",
    "unreadable",
]


@dataclass(frozen=True)
class DataFile:
    """A file of a dataset.

    Attributes
    ----------
    path : str
        Its full path in the store.
    partitions : dict of str to str
        Values from the part of the path below the dataset's.
    """

    path: str
    partitions: dict[str, str]


def data_files(store: Store, path: str) -> list[DataFile]:
    """Return the files under a path, or the file itself, in the order of their names.

    Hidden files and folders (their names begin with ``_`` or ``.``) are left out, and so are
    ``.crc`` files.

    Raises
    ------
    StoreError
        If there are none, or if they belong to a Delta, Iceberg or Hudi table, whose log says which
        of them count.
    """
    root = store.get_full_path(path)
    below = {file: file.removeprefix(root).strip("/") for file in store.find(root)}
    _reject_tables(store, root, list(below.values()))
    files = [
        DataFile(file, partition_values(inner)) for file, inner in below.items() if _is_data(inner)
    ]
    if files:
        return files
    if below or store.exists(root):
        raise StoreError(f"There are no Parquet files under {path!r}.")
    raise StoreError(
        f"There is no Parquet dataset at {path!r}. Write one there, or set the store's train_path "
        "(for validation its val_path) to where one is."
    )


def _reject_tables(store: Store, root: str, below: Sequence[str]) -> None:
    """Reject files of a table format: its folder also holds files that the table has removed."""
    for name in below:
        found = _table_format(name.split("/"))
        if found is not None:
            kind, depth = found
            raise _belongs_to_table(kind, "/".join([root, *name.split("/")[:depth]]), root)
    for parent in _possible_tables(root, is_file="" in below):
        for mark in ("_delta_log", ".hoodie", _ICEBERG):
            names: list[str] = []
            # A program may read what it cannot list the parents of.
            with contextlib.suppress(OSError):
                names = store.names(f"{parent}/{mark}")
            for name in names:
                found = _table_format([mark, name])
                if found is not None:
                    raise _belongs_to_table(found[0], parent, root)


def _possible_tables(root: str, is_file: bool) -> list[str]:
    """Return the folders that a partition, a folder of data files or a file may be a part of."""
    folder = posixpath.dirname(root) if is_file else root
    parents = [folder] if is_file else []
    while "=" in (name := posixpath.basename(folder)) or name == "data":
        folder = posixpath.dirname(folder)
        if not folder.partition("://")[2 if "://" in root else 0].strip("/"):
            break
        parents.append(folder)
    return parents


_ICEBERG = "metadata"


def _table_format(parts: list[str]) -> tuple[str, int] | None:
    """Return the format of the table whose log a file is in, and how deep the table lies."""
    for depth, (name, inner) in enumerate(zip(parts, [*parts[1:], ""], strict=True)):
        if name == "_delta_log":
            return "delta", depth
        if name in (".hoodie", ".hoodie_partition_metadata"):
            return "hudi", depth
        if name == _ICEBERG and inner.endswith((".metadata.json", "version-hint.text")):
            return "iceberg", depth
    return None


def _belongs_to_table(kind: str, table: str, root: str) -> StoreError:
    relation = "holds" if table.startswith(f"{root}/") else "belongs to"
    where = "is" if table == root else f"{relation} {table!r},"
    names = {"delta": "a Delta table", "iceberg": "an Iceberg table", "hudi": "a Hudi table"}
    return StoreError(
        f"{root!r} {where} {names[kind]}: its folder may also hold files that the table has "
        "removed, and only its log says which. Read it with Spark and train on the DataFrame: "
        f'fit(spark.read.format("{kind}").load("{table}")).'
    )


def _is_data(below: str) -> bool:
    # As in Spark, an underscore does not hide a partition column.
    parts = below.split("/")
    return not below.endswith(".crc") and not any(
        part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts
    )


_THREADS = 16


@dataclass(frozen=True)
class Footer:
    """A file's footer. It is read each time it is asked for, and never kept.

    Attributes
    ----------
    file : str
        The file's full path in the store.
    metadata : pyarrow.parquet.FileMetaData
        The footer itself.
    schema : pyarrow.Schema
        The columns as they are read.
    leaves : dict of str to range
        Column to the positions of the Parquet columns that hold it.
    partitions : dict of str to str
        Values from the part of the path below the dataset's.
    """

    file: str
    metadata: parquet.FileMetaData
    schema: pa.Schema
    leaves: dict[str, range]
    partitions: dict[str, str]

    def holds(self, name: str) -> bool:
        """Return whether the file itself holds a column; raise if it holds several."""
        count = len(self.schema.get_all_field_indices(name))
        if count > 1:
            raise ColumnError(
                f"The file {self.file!r} holds {count} columns named {name!r}; expected one. "
                "Rename the others."
            )
        return bool(count)

    def type(self, name: str) -> pa.DataType:
        """Return a column's Arrow type."""
        return self.schema.field(name).type

    def nulls(self, name: str) -> int:
        """Return how many nulls a column holds, as far as the writer recorded them."""
        return sum(
            statistics.null_count
            for group in range(self.metadata.num_row_groups)
            for leaf in self.leaves[name]
            if (statistics := self.metadata.row_group(group).column(leaf).statistics) is not None
            and statistics.has_null_count
        )


def read_footers(store: Store, path: str) -> list[Footer]:
    """Read the footers of all files under a path, as `data_files` lists them.

    Raises
    ------
    StoreError
        If there are no Parquet files, or a file is not Parquet.
    """
    files = data_files(store, path)
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda file: _read(store, file), files))


def _read(store: Store, file: DataFile) -> Footer:
    try:
        metadata = parquet.read_metadata(pa.BufferReader(read_tail(store, file.path)))
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file.path, error) from error
    return Footer(file.path, metadata, schema, leaf_positions(schema), file.partitions)


def unreadable(file: str, error: Exception) -> StoreError:
    """Return the error that says that a file cannot be read, and what to do."""
    return StoreError(
        f"Expected a Parquet file, but PyArrow {pa.__version__} cannot read {file!r} ({error}). "
        "Write it again if it is damaged; move it away, or begin its name with '_', if it is not "
        "data. If Spark wrote lists in lists with spark.sql.parquet.writeLegacyFormat=true, write "
        "them without it."
    )


TAIL_BYTES = 2**16


"""What is fetched of a file's end to have its footer; a longer footer takes a second request."""


_MAGIC_BYTES = 8


"""What follows a footer: its length and four letters."""


_PARSED = 64


"""Footers that are held parsed; many times the memory of those that are not."""


_UNPARSED_BYTES = 2**26


"""Bytes of footers that are held; further ones are read again when they are needed."""


def read_tail(store: Store, path: str) -> bytes:
    """Return the end of a file, from the beginning of its footer on if it is Parquet.

    One request, or two where the footer has more than `TAIL_BYTES`.
    """
    (tail,) = store.read_ranges(path, [(-TAIL_BYTES, None)])
    length = int.from_bytes(tail[-_MAGIC_BYTES:-4], "little") + _MAGIC_BYTES
    if not tail.endswith(b"PAR1") or length <= len(tail):
        return tail[-length:]
    if len(tail) == TAIL_BYTES:
        (tail,) = store.read_ranges(path, [(-length, None)])
    return tail


def leaf_positions(schema: pa.Schema) -> dict[str, range]:
    """Return the positions of the Parquet columns that hold each column."""
    # By position, not by path: a field b of a struct a has the same path as a column a.b, and the
    # paths below a list differ from writer to writer.
    leaves, start = {}, 0
    for field in schema:
        leaves[field.name] = range(start, start + num_leaves(field.type))
        start = leaves[field.name].stop
    return leaves


def _chunk_ranges(metadata: Any, row_group: int, positions: Iterable[int]) -> list[Range]:
    """Return where the chunks of some Parquet columns lie, in the order of the file.

    Parameters
    ----------
    metadata : pyarrow.parquet.FileMetaData
        The footer.
    row_group : int
        Position of the row group.
    positions : iterable of int
        Of the Parquet columns.
    """
    group = metadata.row_group(row_group)
    ranges = []
    for position in sorted(set(positions)):
        chunk = group.column(position)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            start = min(start, chunk.dictionary_page_offset)
        ranges.append((start, start + chunk.total_compressed_size))
    return sorted(ranges)


@dataclass(frozen=True)
class FileFooter:
    """A file's footer.

    Attributes
    ----------
    metadata : pyarrow.parquet.FileMetaData
        The footer itself.
    leaves : mapping of str to range
        See `leaf_positions`.
    end : int
        Where the file ends, or somewhat before that.
    """

    metadata: parquet.FileMetaData
    leaves: Mapping[str, range]
    end: int

    @staticmethod
    def of(tail: bytes) -> FileFooter:
        """Parse the end of a file."""
        metadata = parquet.read_metadata(pa.BufferReader(tail))
        columns = range(metadata.num_columns)
        groups = (_chunk_ranges(metadata, i, columns) for i in range(metadata.num_row_groups))
        end = max((group[-1][1] for group in groups if group), default=0)
        leaves = leaf_positions(metadata.schema.to_arrow_schema())
        return FileFooter(metadata, leaves, end + len(tail))

    def chunks(self, row_group: int, names: Iterable[str]) -> list[Range]:
        """Return where the columns of these names lie in a row group, in the order of the file."""
        positions = [position for name in names for position in self.leaves.get(name, ())]
        return _chunk_ranges(self.metadata, row_group, positions)


class FooterCache:
    """The footers of a store's files, each read once, whoever asks, and when.

    They are held for as long as a run may need them: a few parsed, the others as they are stored,
    64 MiB of those.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._parsed: OrderedDict[str, FileFooter] = OrderedDict()
        self._tails: OrderedDict[str, bytes] = OrderedDict()
        self._tail_bytes = 0
        self._reading: dict[str, Future[bytes]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads for itself, or is told by `add`.
        return FooterCache, (self._store,)

    def get(self, path: str) -> FileFooter:
        """Return a file's footer; several threads may ask for it.

        Raises
        ------
        StoreError, OSError
            If the file cannot be read.
        pyarrow.ArrowException
            If it is not Parquet.
        """
        with self._lock:
            footer = self._parsed.get(path)
            if footer is not None:
                self._parsed.move_to_end(path)
                return footer
        footer = FileFooter.of(self.tail(path))
        with self._lock:
            self._parsed[path] = footer
            while len(self._parsed) > _PARSED:
                self._parsed.popitem(last=False)
        return footer

    def tail(self, path: str) -> bytes:
        """Return the end of a file, as `read_tail` does."""
        with self._lock:
            tail = self._tails.get(path)
            if tail is not None:
                return tail
            others = self._reading.get(path)
            own: Future[bytes] = Future()
            if others is None:
                self._reading[path] = own
        if others is not None:
            return others.result()
        try:
            tail = read_tail(self._store, path)
            self.add({path: tail})
            own.set_result(tail)
            return tail
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._reading[path]

    def add(self, tails: Mapping[str, bytes]) -> None:
        """Take in what another process has read."""
        with self._lock:
            for path, tail in tails.items():
                if path not in self._tails:
                    self._tails[path] = tail
                    self._tail_bytes += len(tail)
            while self._tail_bytes > _UNPARSED_BYTES:
                self._tail_bytes -= len(self._tails.popitem(last=False)[1])
