"""The Parquet files of a dataset: which files there are below a path.

PyArrow's dataset discovery is not used for this. It cannot be told that ``_day=3`` is a partition
and no hidden folder, as Spark writes it, and it guesses types for partitions (32-bit integers, or
text where a number has a fraction) without saying which file has which value.
"""

from __future__ import annotations

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
        If there are none.
    """
    root = store.get_full_path(path)
    below = {file: file.removeprefix(root).strip("/") for file in store.find(root)}
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


def _is_data(below: str) -> bool:
    # As in Spark, an underscore does not hide a partition column.
    parts = below.split("/")
    return not below.endswith(".crc") and not any(
        part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts
    )
