"""Several shards that a rank plays one after the other. Runs on the worker."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType

from typing_extensions import Self

from hvd_estimators.loading.batching import Chunk
from hvd_estimators.loading.readers.base import ChunkedDataModule
from hvd_estimators.loading.readers.planned import PlannedDataModule

__all__ = ["PlayedShards"]


class PlayedShards(ChunkedDataModule):
    """The batches of several shards: for each step those of all shards, one after the other.

    A rank with one shard fewer than others gets an empty batch in each step, so that all ranks
    take the same number of batches. Each shard has a reader of its own, and so the order of its
    rows that it would have on a rank of its own.

    Parameters
    ----------
    modules : sequence of PlannedDataModule
        One reader per shard that the rank plays.
    size : int
        Number of ranks.
    """

    def __init__(self, modules: Sequence[PlannedDataModule], size: int) -> None:
        self.modules = modules
        self._size = size
        self._num_shards = modules[0].train_plan.num_shards
        self._passes = -(-self._num_shards // size)
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for module in self.modules:
            self._opened.enter_context(module)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all readers."""
        self._opened.__exit__(exc_type, exc, traceback)

    def train_chunks(self) -> Generator[Chunk, None, None]:
        """Return the training batches, each in a chunk of its own."""
        idle = self._passes - len(self.modules)
        with contextlib.ExitStack() as stack:
            shards = [
                stack.enter_context(contextlib.closing(_one_by_one(module.train_chunks())))
                for module in self.modules
            ]
            for chunks in zip(*shards, strict=True):
                yield from chunks
                for _ in range(idle):
                    yield Chunk(chunks[0].rows.slice(0, 0), (0,))

    def val_chunks(self) -> Generator[Chunk, None, None]:
        """Return the validation batches of one pass, shard after shard, without empty ones."""
        for module in self.modules:
            with contextlib.closing(_one_by_one(module.val_chunks())) as chunks:
                yield from itertools.islice(chunks, module.steps_per_epoch_val)

    def num_val_batches(self) -> int:
        """Return how many validation batches a pass over all shards has."""
        return sum(module.num_val_batches() for module in self.modules)

    def global_train_sizes(self) -> Iterator[int]:
        """Return the rows of each batch over all ranks, without end."""
        first = self.modules[0]
        sizes = [
            first.train_plan.sizes_of(
                range(start, min(start + self._size, self._num_shards)), first.train_batch_size
            )
            for start in range(0, self._num_shards, self._size)
        ]
        for step in itertools.count(first.skip_train_steps):
            yield from (of_pass[step % len(of_pass)] for of_pass in sizes)


def _one_by_one(chunks: Iterator[Chunk]) -> Generator[Chunk, None, None]:
    """Yield each batch as a chunk."""
    for chunk in chunks:
        start = 0
        for size in chunk.sizes:
            yield Chunk(chunk.rows.slice(start, start + size), (size,))
            start += size
