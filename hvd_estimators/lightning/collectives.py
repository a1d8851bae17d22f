"""Horovod's collectives for tensors of any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import horovod.torch as hvd
import torch

from hvd_estimators.torch.collectives import CARRIED_AS, exchange

__all__ = [
    "broadcast_object",
    "gather_objects",
    "gather_tensor",
    "outside_inference_mode",
    "reduce_tensor",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_inference_mode(function: Function) -> Function:
    """Run a function outside of inference mode, which Lightning uses for validation.

    Horovod's own thread could not write to tensors created in inference mode.
    """
    return torch.inference_mode(False)(function)


@outside_inference_mode
def broadcast_object(value: Any, root: int = 0) -> Any:
    """Return one rank's object on all ranks."""
    return exchange.broadcast(value, "lightning.object", root)


@outside_inference_mode
def gather_objects(value: Any) -> list[Any]:
    """Return every rank's object, in rank order."""
    return exchange.gather(value, "lightning.objects")


def reduce_tensor(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce a tensor over the ranks with ``mean``, ``avg``, ``sum``, ``min`` or ``max``.

    The mean of integers is a float64 tensor, because it may not be an integer.
    """
    if op in ("mean", "avg"):
        if not tensor.is_floating_point():
            tensor = tensor.double()
        return _reduced(tensor, hvd.Average)
    reductions = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
    if op not in reductions:
        raise ValueError(
            f"reduce_op: expected one of 'mean', 'sum', 'min' and 'max', found {op!r}."
        )
    return _reduced(tensor, reductions[op])


@outside_inference_mode
def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Stack the ranks' tensors, all of the same shape, along a new first dimension."""
    carried = CARRIED_AS.get(tensor.dtype, tensor.dtype)
    own = _usable(tensor).to(carried)
    gathered: torch.Tensor = hvd.allgather(own.unsqueeze(0).contiguous())
    return gathered.to(tensor.dtype)


@outside_inference_mode
def _reduced(tensor: torch.Tensor, op: Any) -> torch.Tensor:
    carried = CARRIED_AS.get(tensor.dtype, tensor.dtype)
    reduced: torch.Tensor = hvd.allreduce(_usable(tensor).to(carried).contiguous(), op=op)
    return reduced.to(tensor.dtype)


def _usable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
