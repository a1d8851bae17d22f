"""Copying of row blocks to a GPU, in parallel with steps that use earlier blocks.

Readers put blocks of many batches into page-locked memory, from which the GPU copies each block
asynchronously. A single copy, in a separate stream, covers all batches and columns. Meanwhile the
GPU computes with earlier blocks and the training loop continues. Runs on ranks and in predictors.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from hvd_estimators.loading.blocks import BufferPool, fresh_buffer
from hvd_estimators.loading.interleave import Prefetch

# Blocks have a few MiB, or are one batch. Only the buffer for shuffling rows is larger.
_MOST_LOCKED_BYTES = 64 * 2**20

T = TypeVar("T")

Copy = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]
"""Function that starts copying tensors, and returns a function that waits for the copies."""


def ahead_of_use(
    blocks: Generator[tuple[T, Sequence[torch.Tensor]], None, None], copy: Copy
) -> Generator[tuple[T, list[torch.Tensor]], None, None]:
    """Yield copies of tensors, while the next copies are already in progress.

    A thread reads the blocks and starts their copies, so that the computing thread only waits.

    Parameters
    ----------
    blocks : generator of tuple
        An object that belongs to some tensors, and the tensors.
    copy : callable
        Starts copying tensors, and returns a function that returns the copies.
    """
    started = Prefetch(_started(blocks, copy), 1, "hvd_estimators copies to the GPU")
    try:
        for item, finish in started:
            yield item, finish()
    finally:
        started.close()


def _started(
    blocks: Generator[tuple[T, Sequence[torch.Tensor]], None, None], copy: Copy
) -> Generator[tuple[T, Callable[[], list[torch.Tensor]]], None, None]:
    with contextlib.closing(blocks):
        for item, tensors in blocks:
            yield item, copy(tensors)


def gpu_memory(device: torch.device) -> BufferPool | None:
    """Return page-locked memory for batches that a GPU copies itself; None for other devices."""
    return BufferPool(new_buffer=_page_locked) if device.type == "cuda" else None


def _page_locked(size: int) -> memoryview:
    if size > _MOST_LOCKED_BYTES:
        return fresh_buffer(size)
    # torch does not reuse the memory while a view of it exists.
    locked = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memoryview(locked)  # type: ignore[arg-type]


def cuda_copies(device: torch.device) -> Copy:
    """Return a function that copies tensors to a GPU in a separate stream.

    The GPU copies from page-locked memory (`gpu_memory`) asynchronously. CUDA first copies other
    memory in this thread.
    """
    stream: Any = torch.cuda.Stream(device)
    # Tensors that the GPU may not have copied yet, and that must not be overwritten.
    pending: collections.deque[tuple[Any, Sequence[torch.Tensor]]] = collections.deque()

    def start(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        while pending and pending[0][0].query():
            pending.popleft()
        with torch.cuda.stream(stream):
            copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
            copied_event = stream.record_event()
        pending.append((copied_event, tensors))

        def finish() -> list[torch.Tensor]:
            # The GPU waits, not this thread.
            users = torch.cuda.current_stream(device)
            users.wait_event(copied_event)
            for tensor in copies:
                # The memory belongs to the other stream, which must not reuse it too early.
                tensor.record_stream(users)
            return copies

        return finish

    return start
