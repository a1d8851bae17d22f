"""The Parquet files of a dataset: which files there are below a path.

PyArrow's dataset discovery is not used for this. It cannot be told that ``_day=3`` is a partition
and no hidden folder, as Spark writes it, and it guesses types for partitions (32-bit integers, or
text where a number has a fraction) without saying which file has which value.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_estimators.exceptions import StoreError
from hvd_estimators.parquet.partitions import partition_values
from hvd_estimators.store.base import Store

__all__ = ["DataFile", "data_files"]


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
