"""Objects and flags sent between ranks by ``horovod.torch``."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.torch as hvd
import torch

from hvd_estimators.training.objects import Bytes, ObjectExchange

__all__ = ["exchange", "gather_numbers"]


def gather_numbers(value: int, name: str) -> list[int]:
    """Return an integer, or a flag, of every rank, in the order of the ranks."""
    gathered: Sequence[int] = hvd.allgather(
        torch.tensor([value], dtype=torch.int64), name=name
    ).tolist()
    return list(gathered)


def _gather_bytes(document: Bytes, name: str) -> Bytes:
    own = torch.from_numpy(document.copy())
    gathered: Bytes = hvd.allgather(own, name=name).numpy()
    return gathered


exchange = ObjectExchange(hvd.rank, hvd.size, _gather_bytes)
