"""Averages gradients over ranks while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

__all__ = ["GradientAverager", "average_batch_norm"]

_BUCKET_BYTES = 16 * 2**20


class GradientAverager:
    """Replaces each gradient by its mean over the ranks before the optimizer steps.

    Gradients travel in buckets, each reduced as soon as the last of its gradients is there;
    ``optimizer.step()`` waits for them. A bucket always holds the same tensors in the same order,
    so that sums are taken in the same order in every run. A parameter that took no part on this
    rank counts as zero. Unlike ``horovod.torch.DistributedOptimizer`` it leaves the optimizer's
    class alone, and so works with any.

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
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        passes_per_step: int = 1,
        compression: Any = None,
    ) -> None:
        self._passes = passes_per_step
        self._compression = compression or hvd.Compression.none
        self._sparse = set(_sparse_parameters(module))
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        named = [(n, p) for n, p in module.named_parameters() if p in owned and p.requires_grad]
        self._buckets = list(self._fill_buckets(named))
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._passes_left = dict.fromkeys(self._bucket_of, passes_per_step)
        self._pending = False
        self._alone = hvd.size() == 1
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        optimizer.register_step_pre_hook(lambda *_: self.synchronize())

    @property
    def pending(self) -> bool:
        """Whether gradients have been computed since the last step."""
        return self._pending

    def synchronize(self) -> None:
        """Wait until every gradient is the mean over all ranks."""
        self._pending = False
        if self._alone:
            return
        for bucket in self._buckets:
            if bucket.handle is None:
                self._launch(bucket)
        for bucket in self._buckets:
            self._finish(bucket)
        self._passes_left = dict.fromkeys(self._bucket_of, self._passes)

    def _on_gradient(self, parameter: Any) -> None:
        self._pending = True
        if self._alone:
            return
        bucket = self._bucket_of[parameter]
        if bucket.handle is not None:
            raise RuntimeError(
                "A gradient was computed after it had been sent to the other ranks: more "
                f"backward passes than backward_passes_per_step={self._passes} came before "
                "optimizer.step(). Set backward_passes_per_step to their number."
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = self._zero_gradient(parameter)
        if bucket.sparse:
            (parameter,) = bucket.parameters
            bucket.handle = hvd.sparse_allreduce_async(parameter.grad, bucket.name, hvd.Average)
            return
        compressed = [self._compression.compress(p.grad) for p in bucket.parameters]
        bucket.contexts = [context for _, context in compressed]
        bucket.handle = hvd.grouped_allreduce_async_(
            [tensor for tensor, _ in compressed], name=bucket.name, op=hvd.Average
        )

    def _finish(self, bucket: _Bucket) -> None:
        if bucket.sparse:
            (parameter,) = bucket.parameters
            parameter.grad = bucket.handle()
        else:
            for parameter, output, context in zip(
                bucket.parameters, hvd.synchronize(bucket.handle), bucket.contexts, strict=True
            ):
                parameter.grad = self._compression.decompress(output, context)
        bucket.handle = None
        bucket.waiting = len(bucket.parameters)

    def _zero_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._sparse:
            return torch.zeros_like(parameter)
        indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_zeros((0, *parameter.shape[1:]))
        return torch.sparse_coo_tensor(indices, values, parameter.shape)

    def _fill_buckets(self, named: list[tuple[str, torch.nn.Parameter]]) -> Iterable[_Bucket]:
        """Yield buckets of one dtype each, last parameters first: their gradients come first."""
        open_buckets: dict[torch.dtype, _Bucket] = {}
        for name, parameter in reversed(named):
            if parameter in self._sparse:
                yield _Bucket(f"gradient.{name}", sparse=True, parameters=[parameter])
                continue
            bucket = open_buckets.get(parameter.dtype)
            if bucket is None or bucket.nbytes > _BUCKET_BYTES:
                if bucket is not None:
                    yield bucket
                bucket = _Bucket(f"gradients.{name}", sparse=False, parameters=[])
                open_buckets[parameter.dtype] = bucket
            bucket.parameters.append(parameter)
            bucket.waiting += 1
            bucket.nbytes += parameter.nbytes
        yield from open_buckets.values()


class _Bucket:
    def __init__(self, name: str, sparse: bool, parameters: list[torch.nn.Parameter]) -> None:
        self.name = name
        self.sparse = sparse
        self.parameters = parameters
        self.waiting = len(parameters)
        self.nbytes = 0
        self.handle: Any = None
        self.contexts: list[Any] = []


def average_batch_norm(module: torch.nn.Module) -> None:
    """Set the running statistics of batch normalization to their mean over the ranks."""
    statistics = [
        buffer
        for layer in module.modules()
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase)
        for buffer in (layer.running_mean, layer.running_var)
        if buffer is not None
    ]
    if statistics and hvd.size() > 1:
        hvd.grouped_allreduce_(statistics, name="batch_norm", op=hvd.Average)


def _sparse_parameters(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    for layer in module.modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse:
            yield from layer.parameters(recurse=False)
