"""Rows of several columns that are selected together: scalar columns of one dtype share a block."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_estimators.data.columns import Array, Columns

__all__ = ["Layout", "Memory", "Rows", "gather"]


@dataclass(frozen=True)
class Layout:
    """Which columns share a block.

    Attributes
    ----------
    groups : tuple of tuple of str
        Names of the columns of each block. A group of several is a block of shape ``(columns,
        rows)``, so that each column is contiguous; a group of one is that column as it is, of
        shape ``(rows, *shape)``.
    names : tuple of str
        All columns, in the order in which they were given.
    """

    groups: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]

    @staticmethod
    def of(columns: Columns) -> Layout:
        """Return the layout of columns: scalars of the same dtype together, others alone."""
        by_dtype: dict[str, list[str]] = {}
        for name, array in columns.items():
            alone = array.ndim != 1 or array.dtype.hasobject
            by_dtype.setdefault(f"column {name}" if alone else str(array.dtype), []).append(name)
        return Layout(tuple(map(tuple, by_dtype.values())), tuple(columns))


class Memory:
    """Gives out memory for arrays, used again once nobody holds the arrays any more.

    A fresh piece of memory costs a page fault every 4 KiB, which takes longer than filling it.
    """

    def __init__(self, kept: int = 8) -> None:
        self._kept = kept
        self._buffers: list[tuple[bytearray, weakref.ref[Array]]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array with nothing in it yet."""
        size = math.prod(shape) * dtype.itemsize
        if not size or dtype.hasobject:
            return np.empty(shape, dtype)
        position = len(self._buffers)
        buffer = None
        for i, (candidate, given_out) in enumerate(self._buffers):
            if size <= len(candidate) <= 2 * size and given_out() is None:
                position, buffer = i, candidate
                break
        buffer = buffer or bytearray(size + size // 4)
        # Views of it, and views of these, hold this array, as its memory is not another array's.
        array = np.frombuffer(buffer, dtype, math.prod(shape))
        self._buffers[position : position + 1] = [(buffer, weakref.ref(array))]
        del self._buffers[: -self._kept]
        return array.reshape(shape)


class Rows:
    """Rows in blocks: selecting, cutting and joining take an operation a block, not a column.

    Parameters
    ----------
    layout : Layout
        Which columns are in which block.
    blocks : sequence of ndarray
        One block per group of the layout.
    """

    __slots__ = ("blocks", "layout")

    def __init__(self, layout: Layout, blocks: Sequence[Array]) -> None:
        self.layout = layout
        self.blocks = list(blocks)

    @staticmethod
    def pack(columns: Columns, layout: Layout) -> Rows:
        """Put columns into blocks; copies those that share one."""
        return Rows(
            layout,
            [
                columns[group[0]] if len(group) == 1 else np.stack([columns[n] for n in group])
                for group in layout.groups
            ],
        )

    @staticmethod
    def empty(like: Columns, layout: Layout, rows: int, memory: Memory) -> Rows:
        """Return blocks for a number of rows of such columns, with nothing in them yet."""
        blocks = []
        for group in layout.groups:
            array = like[group[0]]
            shape = (rows, *array.shape[1:]) if len(group) == 1 else (len(group), rows)
            blocks.append(memory.empty(shape, array.dtype))
        return Rows(layout, blocks)

    def columns(self) -> dict[str, Array]:
        """Return views of the columns, by name."""
        arrays: dict[str, Array] = {}
        for group, block in zip(self.layout.groups, self.blocks, strict=True):
            if len(group) == 1:
                arrays[group[0]] = block
            else:
                arrays.update(zip(group, block, strict=True))
        if len(self.layout.groups) == 1:
            return arrays
        return {name: arrays[name] for name in self.layout.names}

    def __len__(self) -> int:
        return self.blocks[0].shape[self._axis(0)]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    def slice(self, start: int, stop: int) -> Rows:
        """Return a view of some rows."""
        return Rows(
            self.layout,
            [
                block[:, start:stop] if self._axis(i) else block[start:stop]
                for i, block in enumerate(self.blocks)
            ],
        )

    def take(self, indices: Array, memory: Memory) -> Rows:
        """Return a copy of the rows at some positions, in their order."""
        result = Rows.empty(self.columns(), self.layout, len(indices), memory)
        for i, (block, target) in enumerate(zip(self.blocks, result.blocks, strict=True)):
            if self._axis(i):
                for column, column_target in zip(block, target, strict=True):
                    gather(column, indices, column_target)
            else:
                gather(block, indices, target)
        return result

    def copy_to(self, other: Rows, start: int) -> None:
        """Copy all rows to a place among those of another."""
        target = other.slice(start, start + len(self))
        for block, target_block in zip(self.blocks, target.blocks, strict=True):
            target_block[...] = block

    def _axis(self, i: int) -> int:
        """Return the axis of a block that counts rows."""
        return int(len(self.layout.groups[i]) > 1)


def gather(array: Array, positions: Array, target: Array) -> None:
    """Copy the entries at some positions (which have to be in range) of the first axis."""
    # Without "clip" NumPy gathers into a buffer first.
    np.take(array, positions, axis=0, out=target, mode="clip")
