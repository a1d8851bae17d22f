"""The memory that a row group takes while it is read page by page, estimated from its footer."""

from __future__ import annotations

from typing import Any

__all__ = ["FETCHED_BYTES", "open_bytes"]

FETCHED_BYTES = 2**18
"""How many bytes of a column are fetched at a time."""

_PAGE_BYTES = 2**20
_PAGE_VALUES = 1024


def open_bytes(chunk: Any) -> int:
    """Return about how much memory a column of a row group takes while it is read page by page.

    It holds a stored page, a decoded page, a dictionary, and what is fetched ahead. Footers do not
    tell how large pages are: writers aim at 1 MiB, but check the size only after each thousand
    values or so.

    Parameters
    ----------
    chunk : pyarrow.parquet.ColumnChunkMetaData
        What the footer tells about the column.
    """
    value = chunk.total_uncompressed_size / max(chunk.num_values, 1)
    page = max(_PAGE_BYTES, int(value * _PAGE_VALUES))
    dictionary = _PAGE_BYTES if chunk.has_dictionary_page else 0
    decoded = min(chunk.total_uncompressed_size, page + dictionary)
    return int(decoded + min(chunk.total_compressed_size, FETCHED_BYTES))
