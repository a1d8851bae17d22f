"""Manifest of a prepared dataset: its columns, its files and the rows of each row group.

The manifest is written as JSON next to the Parquet files and sent to every rank. This module
imports neither PySpark nor a framework, so that the driver and the ranks can read it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from hvd_estimators._util.documents import parse_object

MANIFEST_FILE = "_manifest.json"

_itemsize = functools.lru_cache(lambda dtype: np.dtype(dtype).itemsize)

Kind = Literal["scalar", "array", "vector", "sparse", "partition", "text", "any", "matrix", "rows"]


@dataclass(frozen=True)
class ColumnSpec:
    """One column as stored in Parquet.

    Attributes
    ----------
    name : str
        The column's name in the DataFrame.
    kind : {"scalar", "array", "vector", "sparse", "partition", "text", "any", "matrix", "rows"}
        ``vector`` and ``array`` are stored as lists of one length. ``sparse`` is stored as a list
        of indices and a list of values (see `stored_names`). A ``partition`` is a number in the
        path, as in ``day=3/a.parquet``, and not in the file. ``text`` is strings or bytes, which a
        transformation converts to numbers. ``any`` holds values of any type and length, and
        nulls. ``matrix`` and ``rows`` are a `JoinedSpec`.
    dtype : str
        NumPy name of the element type that readers deliver; ``object`` for text, and for ``any``
        without numbers.
    shape : tuple of int
        Shape of one row; ``()`` for scalars and partitions, ``(n,)`` for vectors.
    stored : tuple of str
        Value of `stored_names` if it does not follow from the name. Default: empty.
    range : tuple of number, or None
        Smallest and largest number in the files; None if unknown. Not part of equality.
    is_whole : bool
        Whether floats stand for decimals without a fraction. Not part of equality.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...] = ()
    stored: tuple[str, ...] = ()
    range: tuple[Any, Any] | None = field(default=None, compare=False)
    is_whole: bool = field(default=False, compare=False)

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the Parquet columns that store this column; empty for a partition."""
        if self.stored or self.kind == "partition":
            return self.stored
        if self.kind == "sparse":
            return (f"{self.name}__indices", f"{self.name}__values")
        return (self.name,)

    @property
    def is_number(self) -> bool:
        """Flag for one number per row."""
        return self.kind in ("scalar", "partition") and self.dtype != "object"

    @property
    def width(self) -> int:
        """Number of elements in one row."""
        width = 1
        for size in self.shape:
            width *= size
        return width

    @property
    def row_bytes(self) -> int:
        """Size of one row in memory; for text, the size of the pointers to it."""
        return self.width * _itemsize(self.dtype)


@dataclass(frozen=True)
class JoinedSpec(ColumnSpec):
    """Columns that readers deliver as one; not part of a stored manifest.

    A ``matrix`` stacks columns with one number per row. ``rows`` is a
    `hvd_estimators.data.rows.RowTable` of any columns.

    Attributes
    ----------
    members : tuple of ColumnSpec
        The columns.
    """

    members: tuple[ColumnSpec, ...] = ()

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the Parquet columns that store the columns."""
        return stored_names(self.members)


def stored_names(specs: Iterable[ColumnSpec]) -> tuple[str, ...]:
    """Return the names of the Parquet columns that store some columns, each once."""
    return tuple(dict.fromkeys(name for spec in specs for name in spec.stored_names))


@dataclass(frozen=True)
class RowGroup:
    """One row group of one Parquet file.

    Attributes
    ----------
    file : str
        Path of the file, as the reader opens it.
    index : int
        Position of the row group in its file.
    rows : int
        Number of rows, at least 1.
    open_bytes : int
        Approximate memory for reading the row group page by page; 0 if irrelevant.
    footer : int
        Checksum of the file's footer, by which readers notice a replaced file; 0 if unknown.
    num_bytes : int
        Approximate size of the columns in memory, see `decoded_bytes`; 0 if unknown.
    """

    file: str
    index: int
    rows: int
    open_bytes: int = 0
    footer: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` (inclusive) to ``stop`` (exclusive) of one row group.

    ``footer`` is `RowGroup.footer`.
    """

    file: str
    row_group: int
    start: int
    stop: int
    footer: int = 0

    @property
    def rows(self) -> int:
        """Number of rows in the range."""
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """The training or validation part of a dataset, in stored order."""

    path: str
    row_groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        """Total number of rows in all row groups."""
        return sum(group.rows for group in self.row_groups)


@dataclass(frozen=True)
class DatasetManifest:
    """Content of a dataset.

    Attributes
    ----------
    columns : tuple of ColumnSpec
        Columns of the dataset.
    train, validation : Split
        Training and validation parts; ``validation`` is None without validation data.
    shuffled : bool
        Whether the stored order is random.
    content : str or None
        Checksum of the rows and their assignment to the splits, independent of the row order. None
        if unknown.
    row_order : str or None
        Checksum of the rows and their positions; None if unknown.
    """

    columns: tuple[ColumnSpec, ...]
    train: Split
    validation: Split | None = None
    shuffled: bool = False
    content: str | None = None
    row_order: str | None = None

    @property
    def validation_rows(self) -> int:
        """Number of validation rows."""
        return self.validation.rows if self.validation else 0

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> DatasetManifest:
        """Parse the output of `to_json`.

        Raises
        ------
        ValueError
            If the text is damaged, or was edited so that it describes no dataset.
        """
        try:
            manifest = DatasetManifest._parsed(parse_object(text))
            _check(manifest)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return manifest

    @staticmethod
    def _parsed(document: Any) -> DatasetManifest:
        columns = tuple(
            ColumnSpec(
                c["name"],
                c["kind"],
                c["dtype"],
                tuple(c["shape"]),
                tuple(c["stored"]),
                tuple(c["range"]) if c.get("range") else None,
                bool(c.get("is_whole", False)),
            )
            for c in document["columns"]
        )
        validation = document["validation"]
        return DatasetManifest(
            columns,
            _split(document["train"]),
            _split(validation) if validation else None,
            bool(document.get("shuffled", False)),
            document.get("content"),
            document.get("row_order"),
        )


def _check(manifest: DatasetManifest) -> None:
    """Check that columns and row groups are possible and that none is listed twice.

    Raises
    ------
    ValueError
        If not.
    """
    for column in manifest.columns:
        texts: tuple[object, ...] = (column.name, column.dtype, *column.stored)
        sizes: tuple[object, ...] = column.shape
        if (
            not all(isinstance(text, str) for text in texts)
            or not all(type(size) is int and size >= -1 for size in sizes)
            or column.kind not in get_args(Kind)
        ):
            raise ValueError(f"impossible column {column}")
        np.dtype(column.dtype)
    _check_unique("columns", [column.name for column in manifest.columns])
    for split in filter(None, (manifest.train, manifest.validation)):
        for group in split.row_groups:
            counts: tuple[object, ...] = (group.index, group.rows, group.open_bytes, group.footer)
            if any(type(count) is not int for count in counts) or (
                group.index < 0 or group.rows < 1 or group.open_bytes < 0
            ):
                raise ValueError(f"impossible row group {group}")
        _check_unique("row groups", [(group.file, group.index) for group in split.row_groups])


def _check_unique(kind: str, values: Sequence[object]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"{kind} are listed twice")


_OPTIONAL = ("open_bytes", "footer", "num_bytes")


def _split(document: dict[str, Any]) -> Split:
    groups = tuple(
        RowGroup(str(g["file"]), g["index"], g["rows"], *(g.get(name, 0) for name in _OPTIONAL))
        for g in document["row_groups"]
    )
    return Split(str(document["path"]), groups)
