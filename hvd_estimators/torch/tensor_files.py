"""Tensors in safetensors files of a store, by name.

A file is the length of its header (8 bytes, little-endian), the header in JSON, and the bytes of
the tensors (https://huggingface.co/docs/safetensors/index#format). Ranks write the tensors one
after another and read rows of them, which the package `safetensors` does on local disks only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_estimators._util.documents import check_types, parse_object
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.checkpoints import TensorFile
from hvd_estimators.store.files import Files

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_FIRST_BYTES = 2**16
"""Bytes of a file that the first request reads; the headers of most files are smaller."""


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file, whose bytes begin at ``start``."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def write_tensors(
    store: Files,
    folder: str,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    values: Iterable[torch.Tensor] | None = None,
) -> TensorFile:
    """Write tensors to a file of a store, one after another, in a thread.

    Parameters
    ----------
    store : Files
        The store.
    folder, name : str
        Folder, and path in it, of the file, which appears when it is complete.
    tensors : mapping of str to torch.Tensor
        Tensors by name, those with large items first, so that each begins at a multiple of its
        item's size.
    values : iterable of torch.Tensor, optional
        The same tensors on the CPU, if they are made while others are written. No more than three
        are held at a time.

    Returns
    -------
    TensorFile
        Name, size and digest of the file.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    document = json.dumps(header).encode()
    document += b" " * (-len(document) % _LENGTH_BYTES)
    digest = hashlib.sha256()
    with store.open_atomic(f"{folder}/{name}") as file, ThreadPoolExecutor(1) as thread:

        def write(content: Any) -> None:
            file.write(content)
            digest.update(content)

        write(len(document).to_bytes(_LENGTH_BYTES, "little") + document)
        pending: list[Future[None]] = []
        for value in tensors.values() if values is None else values:
            if value.numel():
                content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
                pending.append(thread.submit(write, content))
            if len(pending) > 1:
                pending.pop(0).result()
        for left in pending:
            left.result()
    return TensorFile(name, _LENGTH_BYTES + len(document) + end, digest.hexdigest())


class TensorReader:
    """Reads tensors, or rows of them, from files of a store.

    Parameters
    ----------
    store : Files
        The store.
    paths : iterable of str
        The files.
    mapped : bool
        Whether to map files of a local disk into memory instead of reading them.

    Raises
    ------
    FileNotFoundError
        If a file does not exist.
    StoreError
        If one is not a safetensors file, or cannot be read.
    """

    def __init__(self, store: Files, paths: Iterable[str], mapped: bool = False) -> None:
        self._store = store
        self._mapped = mapped
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            try:
                self._entries.update(_read_header(store, path))
            except (ValueError, TypeError, LookupError, OverflowError) as error:
                raise StoreError(
                    f"{path!r} is not a safetensors file, or is damaged "
                    f"({type(error).__name__}: {error})."
                ) from error

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> Sequence[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor that is not read yet."""
        entry = self._entries[name]
        return StoredTensor(self, name, entry.shape, entry.dtype)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the entries from ``start`` to ``stop`` of a tensor's first dimension."""
        entry = self._entries[name]
        inner = entry.shape[1:]
        row_bytes = entry.dtype.itemsize * int(np.prod(inner, dtype=np.int64))
        return self._read(entry, start * row_bytes, stop * row_bytes, (stop - start, *inner))

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        entry = self._entries[name]
        count = entry.dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
        return self._read(entry, 0, count, entry.shape)

    def _read(self, entry: _Entry, begin: int, end: int, shape: tuple[int, ...]) -> torch.Tensor:
        if begin == end:
            return torch.empty(shape, dtype=entry.dtype)
        first, content = entry.start + begin, np.empty(0, np.uint8)
        local = self._store.local_path(entry.path) if self._mapped else None
        if local is not None:
            # Copied where it is changed.
            content = np.memmap(local, np.uint8, "c", first, (end - begin,))
        else:
            (read,) = self._store.read_ranges(entry.path, [(first, entry.start + end)])
            content = np.frombuffer(bytearray(read), np.uint8)
        if len(content) != end - begin:
            raise StoreError(f"{entry.path!r} is not complete. Restore the file.")
        return torch.from_numpy(content).view(entry.dtype).reshape(shape)


def _read_header(store: Files, path: str) -> dict[str, _Entry]:
    """Return the tensors of a file, by name."""
    (begin,) = store.read_ranges(path, [(0, _FIRST_BYTES)])
    start = _LENGTH_BYTES + int.from_bytes(begin[:_LENGTH_BYTES], "little")
    if start > len(begin):
        (further,) = store.read_ranges(path, [(len(begin), start)])
        begin += further
    if len(begin) < start:
        raise ValueError("its header is not complete")
    document = parse_object(begin[_LENGTH_BYTES:start])
    document.pop(_METADATA, None)
    entries = {}
    for name, fields in document.items():
        check_types(fields, {"dtype": str, "shape": list, "data_offsets": list})
        shape, (first, last) = tuple(map(int, fields["shape"])), map(int, fields["data_offsets"])
        dtype = _DTYPES[fields["dtype"]]
        if min((first, *shape)) < 0 or last - first != dtype.itemsize * np.prod(
            shape, dtype=object
        ):
            raise ValueError(f"the shape of {name!r} does not fit its bytes")
        entries[name] = _Entry(path, dtype, shape, start + first)
    return entries


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file, of which a rank reads its part.

    Attributes
    ----------
    reader : TensorReader
        Reader of the file.
    name : str
        Name of the tensor.
    shape : tuple of int
        Shape of the tensor.
    dtype : torch.dtype
        Its type.
    """

    reader: TensorReader
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the entries from ``start`` to ``stop`` of the first dimension."""
        return self.reader.rows(self.name, start, stop)

    def whole(self) -> torch.Tensor:
        """Return the tensor."""
        return self.reader.whole(self.name)
