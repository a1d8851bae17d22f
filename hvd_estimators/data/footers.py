"""Data files of a dataset and their Parquet footers, which a `FooterCache` reads once.

PyArrow's dataset discovery is not suitable. It treats ``_day=3`` as a hidden folder, although Spark
writes partitions with such names. It also guesses partition types (32-bit integers, or text for
numbers with a fraction) without reporting the value of each file.

Runs on the driver and on ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import posixpath
import socket
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.tables import LOG_FOLDERS, DataFile, Table, TableFile, TableFiles, read_log
from hvd_estimators.data.types import is_list, num_leaves, partition_values
from hvd_estimators.exceptions import DataError, HvdEstimatorsError, StoreError
from hvd_estimators.store.base import Store
from hvd_estimators.store.files import ListedFile, is_missing
from hvd_estimators.store.storage_errors import not_damage

T = TypeVar("T")


Log = tuple[str, str] | None
"""Format and folder of a table, or None for a folder that is no table."""


def _data_files(
    store: Store, path: str | TableFiles, log_of: Callable[[str], Log]
) -> list[DataFile]:
    """Return the data files under a path, or the file itself, sorted by name.

    Of a Delta or Iceberg table, these are the files that are part of its current version.

    Partition values are those in paths relative to the dataset's path.

    Files and folders whose names begin with ``_`` or ``.`` and ``.crc`` files are ignored.

    Parameters
    ----------
    store : Store
        The store of the files.
    path : str or TableFiles
        The dataset's path, or one of several, or the files of a table.
    log_of : callable
        See `_find_log`; may remember its results.

    Raises
    ------
    StoreError
        If there are no data files, if one is a pipe or a device, or if they belong to a Hudi table.
        Only the table's log says which of its files are current. Also if the files of a Delta or
        Iceberg table cannot be read, see `read_log`.
    """
    if isinstance(path, TableFiles):
        return list(path.files)
    root = store.get_full_path(path)
    below = [(file.path.removeprefix(root).strip("/"), file) for file in store.list_files(root)]
    table = _find_table(root, [inner for inner, _ in below], log_of)
    files: list[DataFile]
    if table is None:
        files = [(file, partition_values(inner), None) for inner, file in below if _is_data(inner)]
    else:
        listed = {file.path: file for _, file in below}
        files = [
            (told.among(listed, active), partition_values(active.removeprefix(root)), told)
            for active, told in sorted(read_log(store, *table).files.items())
            if f"{active}/".startswith(f"{root}/")
        ]
    for file, _, _ in files:
        if not file.is_regular:
            raise StoreError(
                f"{file.path!r} is not a regular file but a pipe, a socket, a device or a "
                "link to a folder. Move it away, or begin its name with '_', if it is not part of "
                "the dataset. Pass folders that links lead to by their own paths."
            )
    if files:
        return files
    if below or store.exists(root):
        raise StoreError(f"There are no Parquet files under {path!r}.")
    raise StoreError(
        f"There is no Parquet dataset at {path!r}. Write one there, or pass the path of one to "
        "fit_on_parquet (as validation_path for validation, and the index of prepare_data as "
        "dataset_idx)."
    )


def _find_table(root: str, below: Sequence[str], log_of: Callable[[str], Log]) -> Log:
    """Return the format and the folder of the table to which a path belongs, or None.

    Folders of tables also contain files that the table has removed. Other formats, and tables that
    are only a part of the dataset, are errors.
    """
    for name in below:
        table_format = _table_format(name.split("/"))
        if table_format is not None:
            kind, depth = table_format
            folder = "/".join([root, *name.split("/")[:depth]])
            if folder != root or kind == "hudi":
                raise _belongs_to_table(kind, folder, root)
            return kind, root
    for parent in _possible_tables(root, is_file="" in below):
        found = log_of(parent)
        if found is not None:
            if found[0] == "hudi":
                raise _belongs_to_table("hudi", parent, root)
            return found
    return None


def _find_log(store: Store, folder: str) -> Log:
    """Return the table whose log a folder contains."""
    for mark in LOG_FOLDERS.values():
        names: list[str] = []
        # A process may have access to the files but not to their parent folders.
        with contextlib.suppress(OSError):
            names = store.names(f"{folder}/{mark}")
        for name in names:
            table_format = _table_format([mark, name])
            if table_format is not None and (table_format[0] != "hudi" or not table_format[1]):
                return table_format[0], folder
    return None


def _possible_tables(root: str, is_file: bool) -> list[str]:
    """Return the folders that could be the root of a table that contains ``root``.

    These are the parents of a file, of partition folders and of a folder named ``data``.
    """
    folder = posixpath.dirname(root) if is_file else root
    parents = [folder] if is_file else []
    while "=" in (name := posixpath.basename(folder)) or name == "data":
        folder = posixpath.dirname(folder)
        if not folder.partition("://")[2 if "://" in root else 0].strip("/"):
            break
        parents.append(folder)
    return parents


def _table_format(parts: list[str]) -> tuple[str, int] | None:
    """Return the table format of a log file and the depth of the table's folder, or None."""
    for depth, (name, inner) in enumerate(zip(parts, [*parts[1:], ""], strict=True)):
        if name == LOG_FOLDERS["delta"]:
            return "delta", depth
        if name in (LOG_FOLDERS["hudi"], ".hoodie_partition_metadata"):
            return "hudi", depth
        if name == LOG_FOLDERS["iceberg"] and inner.endswith(
            (".metadata.json", "version-hint.text")
        ):
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
    # As in Spark, an underscore does not hide a partition folder. Hadoop's connectors mark folders
    # with empty objects.
    parts = below.split("/")
    return not below.endswith((".crc", "_$folder$")) and not any(
        part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts
    )


_THREADS = 16

_FILES_PER_TASK = 64
"""Maximum number of footers that a thread reads per task; handing over a task takes a while."""

_FAST_SECONDS = 1e-3
"""Maximum time per file at which one thread reads the footers of local files.

Reading then hardly waits, and several threads take longer because they compete for the GIL.
"""

_TIMED_FILES = 16


Spread = Callable[
    [Callable[[Sequence[DataFile]], list[T]], Sequence[Sequence[DataFile]]], list[list[T]]
]
"""Calls a function with each part of the files, in several processes, and returns the results."""

SPREAD_FILES = 10_000
"""Minimum number of files on a remote store whose footers several processes read."""

_FILES_PER_PART = 1000


def read_footers(
    store: Store,
    *paths: str | TableFiles,
    select: Callable[[FileFooter], T],
    spread: Spread[T] | None = None,
) -> list[T]:
    """Read the footers of all files under some paths, as listed by `_data_files`.

    Parameters
    ----------
    store : Store
        Opens the files.
    *paths : str or TableFiles
        Folders or files.
    select : callable
        Returns what to keep of a footer, because many footers fill the memory.
    spread : callable, optional
        Reads many files of a remote store in several processes. Default: this process reads all.

    Raises
    ------
    StoreError
        If there are no Parquet files under a path, or if a file is not Parquet.
    DataError
        If a file is under two of the paths, or if a table does not show all rows of its file.
    """
    remembered, lock = functools.cache(functools.partial(_find_log, store)), threading.Lock()

    def log_of(folder: str) -> Log:
        # Paths are mostly in one table, whose log one thread looks for while the others wait.
        with lock:
            return remembered(folder)

    with ThreadPoolExecutor(_THREADS) as pool:
        listed = pool.map(lambda path: _data_files(store, path, log_of), paths)
        files = list(itertools.chain.from_iterable(listed))
    _reject_duplicates(
        [p for p in paths if isinstance(p, str)], [file.path for file, _, _ in files]
    )
    for file, _, told in files:
        if told is not None:
            told.check_readable(file.path)
    is_many = len(files) >= SPREAD_FILES and store.local_path(files[0][0].path) is None
    if spread is None or not is_many:
        return _read_files(store, select, files)
    read = spread(functools.partial(_read_files, store, select), _parts(files, _FILES_PER_PART))
    return list(itertools.chain.from_iterable(read))


def _read_files(
    store: Store, select: Callable[[FileFooter], T], files: Sequence[DataFile]
) -> list[T]:
    """Read the footers of some files."""

    def read(some: Sequence[DataFile]) -> list[T]:
        return [select(_read(store, *file)) for file in some]

    footers: list[T] = []
    if files and store.local_path(files[0][0].path) is not None:
        started = time.perf_counter()
        footers += read(files[:_TIMED_FILES])
        if time.perf_counter() - started < len(footers) * _FAST_SECONDS:
            return footers + read(files[len(footers) :])
    rest = files[len(footers) :]
    size = min(-(-len(rest) // _THREADS), _FILES_PER_TASK) or 1
    with ThreadPoolExecutor(_THREADS) as pool:
        return footers + list(itertools.chain.from_iterable(pool.map(read, _parts(rest, size))))


def _parts(files: Sequence[DataFile], size: int) -> list[Sequence[DataFile]]:
    return [files[first : first + size] for first in range(0, len(files), size)]


def _reject_duplicates(paths: Sequence[str], files: Sequence[str]) -> None:
    if len(set(files)) < len(files):
        file = next(file for file, count in Counter(files).items() if count > 1)
        raise DataError(
            f"The file {file!r} is under two of the paths {', '.join(paths)}: its rows would be "
            "read twice. Pass each file once."
        )


def _read(
    store: Store, file: ListedFile, partitions: Mapping[str, str], told: TableFile | None
) -> FileFooter:
    with damage_is_store_error(file.path):
        footer = FileFooter.of(file.path, read_tail(store, file.path), partitions)
    if told is None:
        return footer
    told.check_rows(file.path, footer.metadata.num_rows)
    return replace(footer, table=told.table)


@contextlib.contextmanager
def damage_is_store_error(file: str, row_group: int | None = None) -> Iterator[None]:
    """Convert errors of the block to a `StoreError` that names the file and suggests fixes.

    Errors of the store do not change. Errors that the file's content cannot cause, such as lack of
    memory, get their own message (see `not_damage`).

    Parameters
    ----------
    file : str
        The file that the block reads.
    row_group : int, optional
        The row group whose pages the block reads. Default: the block reads the footer.
    """
    try:
        yield
    except (HvdEstimatorsError, pa.ArrowCancelled):
        raise
    except (OSError, MemoryError, pa.ArrowException) as error:
        other = not_damage(error, file)
        if other is not None:
            raise other from error
        if is_missing(error):
            raise StoreError(
                f"There is no file {file!r} on the machine {socket.gethostname()} ({error}). Keep "
                "the files, until training ends, on storage that the driver and all executors see."
            ) from error
        if row_group is not None:
            raise StoreError(
                f"Row group {row_group} of {file!r} cannot be read ({error}). The file is damaged: "
                "prepare the data again, or restore the file."
            ) from error
        raise StoreError(
            f"Expected a Parquet file, but PyArrow {pa.__version__} cannot read {file!r} "
            f"({error}). Write it again if it is damaged; move it away, or begin its name with "
            "'_', if it is not data. If Spark wrote lists in lists with "
            "spark.sql.parquet.writeLegacyFormat=true, write them without it."
        ) from error


TAIL_BYTES = 2**16
"""Bytes fetched from a file's end to get its footer; longer footers need a second request."""

_MAGIC = b"PAR1"
"""First and last bytes of a Parquet file. A footer cannot begin with them."""

_MAGIC_BYTES = 8
"""Bytes after a footer: its length and the magic number."""

_PARSED = 64
"""Maximum number of parsed footers in the cache. They need much more memory than unparsed ones."""

_UNPARSED_BYTES = 2**26
"""Maximum bytes of unparsed footers in the cache. Further footers are read again when needed."""


def read_tail(store: Store, path: str) -> bytes:
    """Return a whole small file, or the end of a large one, starting at its footer.

    A small file has at most `TAIL_BYTES`. This takes one request, or two if the footer is longer.
    """
    tail = _suffix(store, path, TAIL_BYTES)
    if len(tail) < TAIL_BYTES:
        return tail
    length = _footer_bytes(tail)
    if not tail.endswith(_MAGIC) or length <= len(tail):
        return tail[-length:]
    return _suffix(store, path, length)


def _suffix(store: Store, path: str, count: int) -> bytes:
    """Return the last bytes of a file; read a truncated response again."""
    (suffix,) = store.read_ranges(path, [(-count, None)])
    if len(suffix) > _MAGIC_BYTES and suffix.endswith(_MAGIC):
        return suffix
    # The store cannot know the length of a suffix, but checks the length of other ranges.
    size = store.size(path)
    (suffix,) = store.read_ranges(path, [(max(size - count, 0), size)])
    return suffix


def _footer_bytes(tail: bytes) -> int:
    """Return the size of a footer and the bytes after it."""
    return int.from_bytes(tail[-_MAGIC_BYTES:-4], "little") + _MAGIC_BYTES


def footer_checksum(tail: bytes) -> int:
    """Return the checksum of the footer in the end of a file; see `FileFooter`."""
    return zlib.crc32(tail[-_footer_bytes(tail) :])


def is_whole(tail: bytes) -> bool:
    """Return whether the end of a file is the whole file; see `read_tail`."""
    return tail.startswith(_MAGIC)


def leaf_positions(schema: pa.Schema) -> dict[str, range]:
    """Map each column to the positions of the Parquet columns that store it."""
    # Paths are ambiguous: field b of a struct a has the same path as a column a.b. The paths below
    # a list also differ between writers.
    leaves, start = {}, 0
    for name, data_type in zip(schema.names, schema.types, strict=True):
        leaves[name] = range(start, start + num_leaves(data_type))
        start = leaves[name].stop
    return leaves


def _ids(path: tuple[str, ...], column: pa.Field) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the path of a field and of each one nested in it, with its number or 0."""
    yield path, int((column.metadata or {}).get(b"PARQUET:field_id", 0))
    kind = column.type
    nested = []
    if pa.types.is_struct(kind):
        nested = [(kind[i].name, kind[i]) for i in range(kind.num_fields)]
    elif pa.types.is_map(kind):
        nested = [("key", kind.key_field), ("value", kind.item_field)]
    elif is_list(kind):
        nested = [("element", kind.value_field)]
    for name, each in nested:
        yield from _ids((*path, name), each)


class FileColumns:
    """The columns of files with equal schemas.

    Parameters
    ----------
    schema : pyarrow.Schema
        Arrow types of the columns.

    Attributes
    ----------
    schema : pyarrow.Schema
        Arrow types of the columns.
    leaves : mapping of str to range
        See `leaf_positions`.
    counts : mapping of str to int
        Number of columns with each name.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.leaves = leaf_positions(schema)
        self.counts = Counter(schema.names)

    def check(self, file: str, table: Table, names: Iterable[str]) -> None:
        """Check that a file stores columns of an Iceberg table under their names.

        Raises
        ------
        StoreError
            If it does not: columns were renamed, or added after the file was written.
        """
        stored = dict(pair for column in self.schema for pair in _ids((column.name,), column))
        # Files that another program wrote have no numbers, and are known by names.
        numbers = table.ids if any(stored.values()) else dict.fromkeys(table.ids, 0)
        for name in names:
            if {i for i in numbers.items() if i[0][0] == name} != {
                i for i in stored.items() if i[0][0] == name
            }:
                raise StoreError(
                    f"The table {table.name} has a column {name!r} that {file!r} lacks or stores "
                    "under another name, because columns were renamed, dropped or added. Rewrite "
                    "the files with Spark (CALL system.rewrite_data_files, with the option "
                    f"'rewrite-all' = 'true'). {table.remedy}"
                )


_known_columns: tuple[FileColumns, ...] = ()
"""The columns of the last files: files of a dataset mostly have the same ones."""

_MOST_KNOWN = 16


def _columns_of(metadata: parquet.FileMetaData) -> FileColumns:
    """Return the columns of a file: one object for all files with an equal schema."""
    global _known_columns
    # Not `ParquetSchema.equals`, which compares only the names of leaves: "element" for each list.
    schema = metadata.schema.to_arrow_schema().remove_metadata()
    # With the numbers that Iceberg gives columns.
    equal = (known for known in _known_columns if known.schema.equals(schema, check_metadata=True))
    columns = next(equal, None)
    if columns is None:
        columns = FileColumns(schema)
        # Threads may replace each other's entry, which is then made again.
        _known_columns = (columns, *_known_columns[: _MOST_KNOWN - 1])
    return columns


Range = tuple[int, int]
"""Byte range of a file: first byte (inclusive) and last byte (exclusive)."""


@dataclass(frozen=True)
class FileFooter:
    """A parsed footer of a Parquet file.

    Attributes
    ----------
    file : str
        Full path of the file in the store.
    metadata : pyarrow.parquet.FileMetaData
        The parsed footer.
    columns : FileColumns
        The columns of the file.
    tail : bytes
        The whole file, or only its footer and the bytes after it; see `read_tail`.
    checksum : int
        Checksum of the footer. It also changes with the rows of a replaced file, because a footer
        has the statistics and sizes of all columns.
    partitions : mapping of str to str
        Partition values in the path, relative to the dataset's path.
    table : Table or None
        The table to which the file belongs.
    """

    file: str
    metadata: parquet.FileMetaData
    columns: FileColumns
    tail: bytes
    checksum: int
    partitions: Mapping[str, str] = field(default_factory=dict)
    table: Table | None = None

    @staticmethod
    def of(file: str, tail: bytes, partitions: Mapping[str, str] | None = None) -> FileFooter:
        """Parse the end of a file."""
        metadata = parquet.read_metadata(pa.BufferReader(tail))
        columns, checksum = _columns_of(metadata), footer_checksum(tail)
        return FileFooter(file, metadata, columns, tail, checksum, partitions or {})

    def chunks(self, row_group: int, names: Iterable[str]) -> list[Range]:
        """Return the byte ranges of some columns in a row group, in file order."""
        leaves = self.columns.leaves
        return self._ranges(row_group, {leaf for n in names for leaf in leaves.get(n, ())})

    @functools.cached_property
    def end(self) -> int:
        """Offset of the end of the file, or slightly less."""
        leaves = range(self.metadata.num_columns)
        groups = (self._ranges(group, leaves) for group in range(self.metadata.num_row_groups))
        return max((ranges[-1][1] for ranges in groups if ranges), default=0) + len(self.tail)

    def _ranges(self, row_group: int, leaves: Iterable[int]) -> list[Range]:
        group = self.metadata.row_group(row_group)
        ranges = []
        for leaf in leaves:
            chunk = group.column(leaf)
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            ranges.append((start, start + chunk.total_compressed_size))
        return sorted(ranges)


class FooterCache:
    """Cache of the footers of a store's files.

    The cache holds a few parsed footers and up to 64 MiB of unparsed ones, for the whole run.
    Threads that request the same file share one read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._parsed: OrderedDict[str, FileFooter] = OrderedDict()
        self._tails: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._tail_bytes = 0

    def get(self, path: str) -> FileFooter:
        """Return a file's footer. Several threads may call this method.

        Raises
        ------
        StoreError, OSError
            If the file cannot be read.
        pyarrow.ArrowException
            If the file is not Parquet.
        """
        with self._lock:
            footer = self._parsed.get(path)
            if footer is not None:
                self._parsed.move_to_end(path)
                return footer
        footer = FileFooter.of(path, self.tail(path))
        with self._lock:
            self._parsed[path] = footer
            while len(self._parsed) > _PARSED:
                self._parsed.popitem(last=False)
        return footer

    def tail(self, path: str) -> bytes:
        """Return the end of a file; see `read_tail`."""
        with self._lock:
            future = self._tails.get(path)
            is_new = future is None
            future = self._tails.setdefault(path, Future())
            self._tails.move_to_end(path)
        if not is_new:
            return future.result()
        try:
            future.set_result(read_tail(self._store, path))
        except BaseException as error:
            future.set_exception(error)
        with self._lock:
            if future.exception() is not None:
                del self._tails[path]
            else:
                self._tail_bytes += len(future.result())
            # The last ones stay: several row groups of one file are read one after another.
            while self._tail_bytes > _UNPARSED_BYTES and len(self._tails) > _PARSED:
                oldest, read = next(
                    (path, each)
                    for path, each in self._tails.items()
                    if each.done() and each.exception() is None
                )
                del self._tails[oldest]
                self._tail_bytes -= len(read.result())
        return future.result()
