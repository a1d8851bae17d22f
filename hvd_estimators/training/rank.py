"""What every rank does before and after training, whatever the framework."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["check_gpus", "joined"]


@contextlib.contextmanager
def joined(hvd: Any, mp_start_method: str | None) -> Iterator[None]:
    """Be one of Horovod's ranks until the block ends.

    Parameters
    ----------
    hvd : module
        The framework's part of Horovod, such as ``horovod.torch``.
    mp_start_method : str or None
        Start method of ``multiprocessing``; None leaves it as it is.
    """
    if mp_start_method:
        multiprocessing.set_start_method(mp_start_method, force=True)
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()


def check_gpus(available: Sequence[bool]) -> bool:
    """Return whether the ranks have GPUs, given what each of them, in order, says.

    Raises
    ------
    RuntimeError
        If some ranks have a GPU and others have none.
    """
    if any(available) and not all(available):
        lacking = [str(rank) for rank, has_gpu in enumerate(available) if not has_gpu]
        raise RuntimeError(
            f"Ranks {', '.join(lacking)} see no GPU and the others do. Give every task one "
            "(spark.task.resource.gpu.amount), or set use_gpu=False."
        )
    return any(available)
