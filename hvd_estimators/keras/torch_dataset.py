"""Batches of columns as datasets for Keras on torch. Imported on torch only.

A chunk of many batches becomes tensors at once, and batches are slices of these tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import torch

from hvd_estimators.data.arrays import Columns, num_rows
from hvd_estimators.keras.tensors import to_tensors
from hvd_estimators.launch.rank.hang_detection import made_progress
from hvd_estimators.loading.shuffle import Chunk

Form = Callable[[Mapping[str, Any]], Any]

Batches = Chunk | Columns
"""Batches of rows of one length, or one batch of rows of any length."""


def train_dataset(
    chunks: Iterator[Batches], like: Batches, prefetch: int, form: Form | None, skipped: int
) -> Any:
    """Return the batches of chunks, after ``skipped`` times the first one."""
    batches = _batches(chunks, form)
    first = next(batches)
    return _loader(_Once(itertools.chain(itertools.repeat(first, skipped), [first], batches)))


def validation_dataset(
    chunks: Callable[[], Iterator[Batches]],
    like: Batches,
    prefetch: int,
    form: Form | None,
    steps: int,
    batches: int | None,
) -> Any:
    """Return at most ``steps`` batches; every iteration reads them from the start."""
    return _loader(_Repeated(lambda: itertools.islice(_batches(chunks(), form), steps)))


def first(like: Batches, form: Form | None) -> Any:
    """Return the first batch of a chunk."""
    return next(_batches(iter([like]), form))


def reading_first(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the step: on torch, no step runs without a batch."""
    return step


class _Once(torch.utils.data.IterableDataset[Any]):
    """Batches that can be iterated once. The first one is repeated if only this one was read.

    ``fit`` reads a batch for its shapes, and starts again.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._unused: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        while True:
            if not self._unused:
                try:
                    self._unused.append(next(self._batches))
                except StopIteration:
                    return
            yield self._unused[0]
            # Reached only if the next batch is asked for.
            self._unused.clear()


class _Repeated(torch.utils.data.IterableDataset[Any]):
    def __init__(self, iterate: Callable[[], Iterator[Any]]) -> None:
        self._iterate = iterate

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()


def _loader(dataset: torch.utils.data.IterableDataset[Any]) -> Any:
    # Its own generator: a loader draws a number for each iteration.
    return torch.utils.data.DataLoader(
        dataset, batch_size=None, collate_fn=_unchanged, generator=torch.Generator()
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _batches(chunks: Iterator[Batches], form: Form | None) -> Iterator[Any]:
    for chunk in chunks:
        made_progress()
        if isinstance(chunk, Mapping):  # a single batch of rows of any length
            arrays, sizes = chunk, [num_rows(chunk)]
        else:
            arrays, sizes = chunk.rows.columns(), list(chunk.sizes)
        columns = to_tensors(arrays)
        structure = columns if form is None else form(columns)
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            yield keras.tree.map_structure(lambda tensor, part=part: tensor[part], structure)
            start += size
