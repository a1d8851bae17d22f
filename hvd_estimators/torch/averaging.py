"""Statistics of batch normalization, averaged over the ranks."""

from __future__ import annotations

import horovod.torch as hvd
import torch

__all__ = ["average_batch_norm", "batch_norm_statistics"]


def average_batch_norm(module: torch.nn.Module) -> None:
    """Set the running statistics of batch normalization to their mean over the ranks."""
    statistics = batch_norm_statistics(module)
    if statistics and hvd.size() > 1:
        hvd.grouped_allreduce_(statistics, name="batch_norm", op=hvd.Average)


def batch_norm_statistics(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the running statistics of a module's batch normalization."""
    return [
        buffer
        for layer in module.modules()
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase)
        for buffer in (layer.running_mean, layer.running_var)
        if buffer is not None
    ]
