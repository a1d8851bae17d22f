"""What a shard has for itself in torch, where a rank plays several: buffers of the module."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.torch.averaging import average_batch_norm, batch_norm_statistics
from hvd_estimators.training.shards import ShardStates

__all__ = ["BufferState", "average_shards"]


class BufferState:
    """The buffers of a module: statistics of batch normalization, counts, averages.

    Parameters
    ----------
    module : torch.nn.Module
        The module that is trained.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def capture(self) -> dict[str, torch.Tensor]:
        """Return copies of the buffers."""
        return {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}

    def restore(self, state: Any) -> None:
        """Set the buffers, in place, to what `capture` returned."""
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in state and state[name].shape == buffer.shape:
                    buffer.copy_(state[name])


def average_shards(module: torch.nn.Module, states: ShardStates) -> None:
    """Set the running statistics of batch normalization to their mean over the shards.

    Called by all ranks. With as many ranks as shards that is the mean over the ranks.
    """
    if states.passes == 1:
        average_batch_norm(module)
        return
    states.enter(0)
    statistics = batch_norm_statistics(module)
    if not statistics:
        return
    sums = [torch.zeros_like(value) for value in statistics]

    def add(shard: int) -> None:
        for total, value in zip(sums, statistics, strict=True):
            total += value / states.num_shards

    def set_mean(shard: int) -> None:
        for value, mean in zip(statistics, sums, strict=True):
            value.copy_(mean)

    states.for_each(add)
    if hvd.size() > 1:
        hvd.grouped_allreduce_(sums, name="batch_norm", op=hvd.Sum)
    states.for_each(set_mean)
