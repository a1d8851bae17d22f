"""Averages the gradients of each backward pass over the ranks, for any number of optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.torch.buckets import Bucket, fill_buckets, sparse_parameters
from hvd_estimators.torch.stated_denominators import StatedDenominators

__all__ = ["BackwardAverager"]


class BackwardAverager:
    """Makes gradients the means over the ranks by the end of a backward pass.

    What had been accumulated before is averaged with it, so that passes outside `averaging` add up
    locally until one inside it. Buckets are sent off while the pass still runs. Which parameters
    train is looked at in every pass: they can be frozen, unfrozen and given to optimizers later.

    Parameters
    ----------
    module : torch.nn.Module
        Names the parameters.
    compression : horovod compressor, optional
        For example ``horovod.torch.Compression.fp16``.
    denominators : StatedDenominators, optional
        Divides averaged gradients by the denominators that losses state.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        compression: Any = None,
        denominators: StatedDenominators | None = None,
    ) -> None:
        self._module = module
        self._compression = compression
        self._hooks: dict[torch.Tensor, Any] = {}
        self._plans: dict[tuple[int, ...], list[Bucket]] = {}
        self._bucket_of: dict[torch.Tensor, Bucket] = {}
        self._pending = False
        self._unused: set[torch.Tensor] | None = None
        self._denominators = denominators

    @property
    def pending(self) -> bool:
        """Whether there are gradients that have not been averaged."""
        return self._pending

    def note_unused(self) -> None:
        """Note from now on which gradients no optimizer has stepped with yet."""
        self._unused = set()

    def used(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer steps with the gradients that there are."""
        if self._unused:
            for group in optimizer.param_groups:
                self._unused.difference_update(group["params"])

    def unused_gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients that wait for a step, by the parameters' names in the module."""
        if not self._unused:
            return {}
        named = self._module.named_parameters()
        return {n: p.grad for n, p in named if p in self._unused and p.grad is not None}

    def restore_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set gradients that wait for a step."""
        for name, parameter in self._module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device)
                if self._unused is not None:
                    self._unused.add(parameter)

    @contextlib.contextmanager
    def averaging(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Average all gradients of the optimizers' parameters when the block ends.

        Entered by all ranks, or by none.
        """
        buckets = self._buckets(optimizers)
        alone = hvd.size() == 1
        if not alone:
            self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        try:
            yield
        finally:
            self._bucket_of = {}
        self._pending = False
        if not alone:
            for bucket in buckets:
                if not bucket.in_flight:
                    bucket.launch()
            for bucket in buckets:
                bucket.finish()
        if self._denominators is not None:
            self._denominators.divide(p for bucket in buckets for p in bucket.parameters)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Notice the gradients of the optimizers' parameters from now on."""
        self._buckets(optimizers)

    def _buckets(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Bucket]:
        """Return the buckets of the parameters that are being trained."""
        trained = {
            id(parameter): parameter
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        key = tuple(trained)
        if key not in self._plans:
            # In the module's order, which the ranks share; parameters outside the module come last.
            named = [(n, p) for n, p in self._module.named_parameters() if id(p) in trained]
            known = {id(parameter) for _, parameter in named}
            others = [parameter for parameter in trained.values() if id(parameter) not in known]
            named += [(f"parameter_{index}", p) for index, p in enumerate(others)]
            sparse = set(sparse_parameters(self._module))
            self._plans[key] = fill_buckets(named, sparse, self._compression)
            for _, parameter in named:
                if parameter not in self._hooks:
                    hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                    self._hooks[parameter] = hook
        return self._plans[key]

    def _on_gradient(self, parameter: Any) -> None:
        self._pending = True
        if self._unused is not None:
            self._unused.add(parameter)
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        if bucket.in_flight:
            raise RuntimeError(
                "The gradient of a parameter came twice in one backward pass. Set "
                "use_reentrant=False where torch.utils.checkpoint is used."
            )
        bucket.waiting -= 1
        if bucket.waiting == 0:
            bucket.launch()
