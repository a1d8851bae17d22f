"""Blocks of rows on their way to a GPU, beside the steps that use earlier ones. Runs on the worker.

A block of many batches is copied into page-locked memory, from where the GPU fetches it by itself,
in a stream of its own: one copy for all batches and columns of the block, while the GPU computes
and Python goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import torch

__all__ = ["ahead_of_use", "cuda_copies"]

T = TypeVar("T")

Copy = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]
"""Begins to copy tensors, and returns what waits for the copies and returns them."""


def ahead_of_use(
    blocks: Iterable[tuple[T, Sequence[torch.Tensor]]], copy: Copy
) -> Generator[tuple[T, list[torch.Tensor]], None, None]:
    """Yield tensors as copies, of which the next ones are on their way while these are used.

    Parameters
    ----------
    blocks : iterable of tuple
        Something that goes with some tensors, and the tensors.
    copy : callable
        Begins to copy tensors, and returns what returns the copies.
    """
    waiting: tuple[T, Callable[[], list[torch.Tensor]]] | None = None
    for what, tensors in blocks:
        following = what, copy(tensors)
        if waiting is not None:
            yield waiting[0], waiting[1]()
        waiting = following
    if waiting is not None:
        yield waiting[0], waiting[1]()


def cuda_copies(device: torch.device) -> Copy:
    """Return what copies tensors to a GPU in a stream of its own."""
    stream: Any = torch.cuda.Stream(device)

    def begin(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        # torch does not use page-locked memory again before the copies from it are done.
        pinned = [tensor.pin_memory() for tensor in tensors]
        with torch.cuda.stream(stream):
            copies = [tensor.to(device, non_blocking=True) for tensor in pinned]
            copied = stream.record_event()

        def finish() -> list[torch.Tensor]:
            # It is the GPU that waits, and not this thread.
            users = torch.cuda.current_stream(device)
            users.wait_event(copied)
            for tensor in copies:
                # Their memory belongs to the other stream, which is not to use it too early.
                tensor.record_stream(users)
            return copies

        return finish

    return begin
