"""`torch.nn.SyncBatchNorm` on CPUs, for which torch has no synchronization."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

# The module does not declare its names for type checkers.
dist: Any = torch.distributed
_layer: Any = torch.nn.SyncBatchNorm

_torchs_forward: Any = _layer.forward


@contextlib.contextmanager
def synchronizing_on_cpus() -> Iterator[None]:
    """Let `torch.nn.SyncBatchNorm` take statistics over all ranks on CPUs, too."""
    before, _layer.forward = _layer.forward, _forward
    try:
        yield
    finally:
        _layer.forward = before


def _forward(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    is_synchronized = layer.training and dist.is_initialized()
    if rows.device.type != "cpu" or not is_synchronized:
        result: torch.Tensor = _torchs_forward(layer, rows)
        return result
    others = [0, *range(2, rows.dim())]
    shape = (1, -1, *(1 for _ in others[1:]))
    values = rows if rows.dtype == torch.float64 else rows.float()
    # Ranks may have different numbers of rows. Deviations from the mean cancel no digits.
    own = torch.cat([values.sum(others), values.new_tensor([values.numel() / rows.shape[1]])])
    total: torch.Tensor = _Sum.apply(own, layer.process_group)
    count = total[-1].detach()
    mean = total[:-1] / count
    deviations = values - mean.view(shape)
    squares: torch.Tensor = _Sum.apply(deviations.square().sum(others), layer.process_group)
    variance = squares / count
    if layer.track_running_stats:
        with torch.no_grad():
            layer.num_batches_tracked += 1
            momentum = layer.momentum
            if momentum is None:
                momentum = 1.0 / float(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
            unbiased = (squares / (count - 1)).to(layer.running_var.dtype)
            layer.running_var.lerp_(unbiased, momentum)
    normalized = deviations * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        normalized = normalized * layer.weight.view(shape) + layer.bias.view(shape)
    return normalized.to(rows.dtype)


class _Sum(torch.autograd.Function):
    """Sum of a tensor over the ranks, whose gradients are summed, too."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        context.group, total = group, tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=context.group)
        return total, None
