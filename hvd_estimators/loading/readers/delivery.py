"""A user's data module, with checks of what it delivers. Runs on the worker."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from typing_extensions import Self

from hvd_estimators.exceptions import DataError
from hvd_estimators.loading.batching import Chunk
from hvd_estimators.loading.readers.base import ChunkedDataModule, DataModule

__all__ = ["HeldDataModule"]


class HeldDataModule(ChunkedDataModule):
    """Passes on what a data module delivers, and raises if it ends too early.

    Training would go on without rows, or wait for the other ranks, and a mean over nothing is nan.

    Parameters
    ----------
    module : DataModule
        The user's.
    rank : int
        This rank.
    steps : int
        Training batches of an epoch on each rank.
    skip_steps : int
        Those that were taken in an earlier part of the run.
    has_val_rows : bool
        Whether the rank has rows to validate on.
    """

    def __init__(
        self, module: DataModule, *, rank: int, steps: int, skip_steps: int, has_val_rows: bool
    ) -> None:
        self.module = module
        self._rank = rank
        self._steps = steps
        self._skip_steps = skip_steps
        self._has_val_rows = has_val_rows
        self._val_batches = 0

    def __enter__(self) -> Self:
        self.module.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the user's module."""
        self.module.__exit__(exc_type, exc, traceback)

    def train_chunks(self) -> Iterator[Chunk]:
        """Return the training batches in chunks; raise `DataError` if they end."""
        delivered = 0
        for chunk in self.module.train_chunks():
            delivered += len(chunk.sizes)
            yield chunk
        epoch, of_epoch = divmod(self._skip_steps + delivered, self._steps)
        raise DataError(
            f"Rank {self._rank}, epoch {epoch} (the first is 0): {self._name}.train_data() ended "
            f"after {of_epoch} of {self._steps} batches ({delivered} in all). Let it go on without "
            "end, pass after pass, or set train_steps_per_epoch to the batches that every rank has."
        )

    def val_chunks(self) -> Iterator[Chunk]:
        """Return the validation batches of one pass; raise `DataError` if there are too few."""
        delivered = 0
        for chunk in self.module.val_chunks():
            delivered += len(chunk.sizes)
            yield chunk
        wanted = max(self._val_batches, int(self._has_val_rows))
        if delivered < wanted:
            raise DataError(
                f"Rank {self._rank}: {self._name}.val_data() ended after {delivered} batches; "
                f"expected {wanted} at least"
                f"{', as in the passes before' if self._val_batches else ''}. Return a new "
                "iterator over the validation rows each time."
            )
        self._val_batches = delivered

    def global_train_sizes(self) -> Iterator[int] | None:
        """Return the answer of the user's module."""
        return self.module.global_train_sizes()

    @property
    def _name(self) -> str:
        return type(self.module).__name__
