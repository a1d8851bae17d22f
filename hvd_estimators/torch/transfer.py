"""Blocks of rows on their way to a GPU, beside the steps that use earlier ones. Runs on the worker.

Readers put blocks of many batches into page-locked memory, from where the GPU fetches each by
itself: one copy for all batches and columns, in a stream of its own, while it computes with earlier
ones and the training loop goes on.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from hvd_estimators.loading.blocks import BufferPool, fresh_buffer
from hvd_estimators.loading.interleave import Prefetch

__all__ = ["ahead_of_use", "cuda_copies", "gpu_memory", "on_cpu"]

# Blocks have a few MiB, or are one batch. What is larger is the buffer in which rows are shuffled.
_MOST_LOCKED_BYTES = 64 * 2**20

T = TypeVar("T")

Copy = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]
"""Begins to copy tensors, and returns what waits for the copies and returns them."""


def ahead_of_use(
    blocks: Generator[tuple[T, Sequence[torch.Tensor]], None, None], copy: Copy
) -> Generator[tuple[T, list[torch.Tensor]], None, None]:
    """Yield tensors as copies, of which the next ones are on their way while these are used.

    A thread draws the blocks and begins their copies, so that whoever computes only waits.

    Parameters
    ----------
    blocks : generator of tuple
        Something that goes with some tensors, and the tensors.
    copy : callable
        Begins to copy tensors, and returns what returns the copies.
    """
    begun = Prefetch(_begun(blocks, copy), 1, "hvd_estimators copies to the GPU")
    try:
        for what, finish in begun:
            yield what, finish()
    finally:
        begun.close()


def _begun(
    blocks: Generator[tuple[T, Sequence[torch.Tensor]], None, None], copy: Copy
) -> Generator[tuple[T, Callable[[], list[torch.Tensor]]], None, None]:
    with contextlib.closing(blocks):
        for what, tensors in blocks:
            yield what, copy(tensors)


def gpu_memory(device: torch.device) -> BufferPool | None:
    """Return memory for batches from which a GPU fetches by itself; None for other devices."""
    return BufferPool(new_buffer=_page_locked) if device.type == "cuda" else None


def _page_locked(size: int) -> memoryview:
    if size > _MOST_LOCKED_BYTES:
        return fresh_buffer(size)
    # torch does not give it to others while a view of it is held.
    locked = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memoryview(locked)  # type: ignore[arg-type]


def cuda_copies(device: torch.device) -> Copy:
    """Return what copies tensors to a GPU in a stream of its own.

    From page-locked memory (`gpu_memory`) the GPU fetches by itself; what lies elsewhere CUDA
    copies before, in this thread.
    """
    stream: Any = torch.cuda.Stream(device)
    # What the GPU may not have fetched yet, which nobody is to write to.
    fetched: collections.deque[tuple[Any, Sequence[torch.Tensor]]] = collections.deque()

    def begin(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        while fetched and fetched[0][0].query():
            fetched.popleft()
        with torch.cuda.stream(stream):
            copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
            copied = stream.record_event()
        fetched.append((copied, tensors))

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


def on_cpu(value: Any) -> Any:
    """Return a tensor, or lists, tuples and dicts of some, without their graphs on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [on_cpu(entry) for entry in value]
    return tuple(map(on_cpu, value)) if type(value) is tuple else value
