"""Parts of columns in, shuffled batches of exact sizes out, with array operations only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hvd_estimators.data.columns import Array, Columns, concatenate, num_rows, take

__all__ = ["SHUFFLE_BUFFER_BYTES", "buffer_rows", "cut_batches"]

SHUFFLE_BUFFER_BYTES = 128 * 2**20
"""Bytes of rows among which `cut_batches` shuffles."""


def buffer_rows(part: Columns) -> int:
    """Return how many rows like those of a part fill the shuffle buffer, at least 1."""
    row_bytes = sum(array.nbytes for array in part.values()) / max(num_rows(part), 1)
    return max(int(SHUFFLE_BUFFER_BYTES / max(row_bytes, 1)), 1)


def cut_batches(
    parts: Iterable[Columns], sizes: Sequence[int], rng: np.random.Generator | None = None
) -> Iterator[dict[str, Array]]:
    """Cut the rows of one pass into batches of given sizes.

    Rows are shuffled by permuting a buffer of `SHUFFLE_BUFFER_BYTES`; when it is full, half of it
    leaves as batches and the other half stays, to be mixed with what comes next.

    Parameters
    ----------
    parts : iterable of Columns
        The rows of the pass, for example one part per row group.
    sizes : sequence of int
        Rows of each batch; they add up to the rows of all parts.
    rng : numpy.random.Generator, optional
        Source of the permutations; without it the rows keep their order.

    Yields
    ------
    dict
        Column name to array, with as many rows as the batch's size says (0 is possible).
    """
    remaining = list(reversed(sizes))
    held: list[Columns] = []
    held_rows = 0
    for part in parts:
        held.append(part)
        held_rows += num_rows(part)
        keep = buffer_rows(part) // 2 if rng is not None else 0
        if rng is not None and held_rows < 2 * keep:
            continue
        window = concatenate(held)
        order = rng.permutation(held_rows) if rng is not None else None
        position = 0
        while remaining and held_rows - position - remaining[-1] >= keep:
            size = remaining.pop()
            yield _slice(window, order, position, position + size)
            position += size
        held = [_slice(window, order, position, held_rows)]
        held_rows -= position
    window = concatenate(held)
    order = rng.permutation(held_rows) if rng is not None else None
    position = 0
    while remaining:
        size = remaining.pop()
        yield _slice(window, order, position, position + size)
        position += size


def _slice(window: Columns, order: Array | None, start: int, stop: int) -> dict[str, Array]:
    return take(window, slice(start, stop) if order is None else order[start:stop])
