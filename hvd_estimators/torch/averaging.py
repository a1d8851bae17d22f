"""Averages gradients over the ranks while the backward pass is still running."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.torch.buckets import fill_buckets, sparse_parameters
from hvd_estimators.torch.stated_denominators import StatedDenominators

__all__ = ["GradientAverager", "average_batch_norm", "batch_norm_statistics"]


class GradientAverager:
    """Replaces each gradient by its mean over the ranks before the optimizer steps.

    Gradients travel in buckets, each reduced as soon as the last of its gradients is there;
    ``optimizer.step()`` waits for them. A bucket always holds the same tensors in the same order,
    so that sums are taken in the same order in every run. A parameter that took no part on this
    rank counts as zero, one that took no part on any rank keeps no gradient. Unlike
    ``horovod.torch.DistributedOptimizer`` it leaves the optimizer's class alone, and so works
    with any.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its parameters that require gradients are averaged.
    module : torch.nn.Module
        Names the parameters.
    passes_per_step : int
        Backward passes that add up before a step.
    compression : horovod compressor, optional
        For example ``horovod.torch.Compression.fp16``.
    by_end_of_pass : bool
        Whether the last backward pass before a step waits for the gradients already, so that who
        looks at them before the step, such as a gradient scaler or a clipping function, finds the
        mean over the ranks. Holds where each parameter takes part in that pass.
    denominators : StatedDenominators, optional
        Divides averaged gradients by the denominators that losses state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        passes_per_step: int = 1,
        compression: Any = None,
        by_end_of_pass: bool = False,
        denominators: StatedDenominators | None = None,
    ) -> None:
        self._passes = passes_per_step
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        named = [(n, p) for n, p in module.named_parameters() if p in owned and p.requires_grad]
        self._buckets = fill_buckets(named, set(sparse_parameters(module)), compression)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._passes_left = dict.fromkeys(self._bucket_of, passes_per_step)
        self._pending = False
        self._is_averaged = False
        self._by_end_of_pass = by_end_of_pass
        self._alone = hvd.size() == 1
        self._denominators = denominators
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        optimizer.register_step_pre_hook(lambda *_: self._before_step())

    @property
    def pending(self) -> bool:
        """Whether gradients have been computed since the last step."""
        return self._pending

    def _before_step(self) -> None:
        if not self._is_averaged:
            self._synchronize()
        self._is_averaged = False

    def _synchronize(self) -> None:
        """Wait until every gradient is the mean over all ranks."""
        self._pending = False
        if not self._alone:
            for bucket in self._buckets:
                if not bucket.in_flight:
                    bucket.launch()
            for bucket in self._buckets:
                bucket.finish()
            self._passes_left = dict.fromkeys(self._bucket_of, self._passes)
        if self._denominators is not None:
            self._denominators.divide(self._bucket_of)

    def _on_gradient(self, parameter: Any) -> None:
        self._pending = True
        if self._alone:
            return
        # Gradients that no step has used are added to: a scaler has skipped it.
        self._is_averaged = False
        bucket = self._bucket_of[parameter]
        if bucket.in_flight:
            raise RuntimeError(
                "A gradient was computed after it had been sent to the other ranks: more "
                f"backward passes than backward_passes_per_step={self._passes} came before "
                "optimizer.step(). Set backward_passes_per_step to their number."
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                bucket.launch()
                if self._by_end_of_pass and all(b.in_flight for b in self._buckets):
                    self._synchronize()
                    self._is_averaged = True


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
