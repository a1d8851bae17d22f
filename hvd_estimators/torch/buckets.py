"""Gradients in buckets that always hold the same tensors in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

__all__ = ["Bucket", "fill_buckets", "sparse_parameters"]

_BUCKET_BYTES = 16 * 2**20


class Bucket:
    """Gradients that travel to the other ranks together.

    Parameters
    ----------
    name : str
        Name of the reduction; the same on all ranks.
    parameters : list of torch.nn.Parameter
        Their gradients are averaged; of one dtype.
    sparse : bool
        Whether the gradient, then of a single parameter, is a sparse tensor.
    compression : horovod compressor
        For example ``horovod.torch.Compression.none``.
    """

    def __init__(
        self, name: str, parameters: list[torch.nn.Parameter], sparse: bool, compression: Any
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.sparse = sparse
        self.waiting = len(parameters)
        self._compression = compression
        self._handle: Any = None
        self._contexts: list[Any] = []
        self._lacking: list[int] = []

    @property
    def in_flight(self) -> bool:
        """Whether the gradients are on their way."""
        return self._handle is not None

    def launch(self) -> None:
        """Send the gradients; a gradient that this rank lacks counts as zero."""
        self._lacking = [i for i, p in enumerate(self.parameters) if p.grad is None]
        for index in self._lacking:
            self.parameters[index].grad = self._zero_gradient(self.parameters[index])
        if self.sparse:
            (parameter,) = self.parameters
            self._handle = hvd.sparse_allreduce_async(parameter.grad, self.name, hvd.Average)
            return
        compressed = [self._compress(p.grad) for p in self.parameters]
        self._contexts = [context for _, context in compressed]
        # Which rank has which gradient is sent too, so that a gradient that no rank has stays None.
        has = torch.ones(len(self.parameters), dtype=torch.float32)
        has[self._lacking] = 0.0
        tensors = [tensor for tensor, _ in compressed]
        self._handle = hvd.grouped_allreduce_async_(
            [*tensors, has.to(tensors[0].device, tensors[0].dtype)], name=self.name, op=hvd.Average
        )

    def finish(self) -> None:
        """Wait for the gradients, and make each the mean over the ranks."""
        if self.sparse:
            (parameter,) = self.parameters
            parameter.grad = self._handle()
        else:
            *outputs, has = hvd.synchronize(self._handle)
            for parameter, output, context in zip(
                self.parameters, outputs, self._contexts, strict=True
            ):
                gradient = self._decompress(output, context, parameter.dtype)
                own = parameter.grad
                if own is None or own.is_contiguous():
                    parameter.grad = gradient
                else:  # In the order of the parameter, such as channels_last.
                    own.copy_(gradient)
            if self._lacking:
                held = has.tolist()
                for index in self._lacking:
                    if not held[index]:
                        self.parameters[index].grad = None
        self._handle = None
        self.waiting = len(self.parameters)

    def _compress(self, gradient: Any) -> tuple[torch.Tensor, Any]:
        # Horovod supports neither bfloat16 nor complex numbers.
        if gradient.dtype == torch.bfloat16:
            gradient = gradient.float()
        elif gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        tensor, context = self._compression.compress(gradient)
        # As Horovod takes them.
        return tensor.contiguous(), context

    def _decompress(self, tensor: torch.Tensor, context: Any, dtype: torch.dtype) -> torch.Tensor:
        gradient: torch.Tensor = self._compression.decompress(tensor, context)
        return torch.view_as_complex(gradient) if dtype.is_complex else gradient.to(dtype)

    def _zero_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if not self.sparse:
            return torch.zeros_like(parameter)
        indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_zeros((0, *parameter.shape[1:]))
        return torch.sparse_coo_tensor(indices, values, parameter.shape)


def fill_buckets(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    sparse: set[torch.nn.Parameter],
    compression: Any = None,
) -> list[Bucket]:
    """Return buckets of one dtype each, last parameters first: their gradients come first.

    Parameters
    ----------
    named : sequence of tuple
        Names and parameters, in an order that all ranks share.
    sparse : set of torch.nn.Parameter
        Those whose gradients are sparse.
    compression : horovod compressor, optional
        Default: ``horovod.torch.Compression.none``.
    """
    compression = compression or hvd.Compression.none
    buckets: list[Bucket] = []
    groups: dict[torch.dtype, list[tuple[str, torch.nn.Parameter]]] = {}

    def close(dtype: torch.dtype) -> None:
        group = groups.pop(dtype)
        parameters = [parameter for _, parameter in group]
        buckets.append(Bucket(f"gradients.{group[0][0]}", parameters, False, compression))

    for name, parameter in reversed(named):
        if parameter in sparse:
            buckets.append(Bucket(f"gradient.{name}", [parameter], True, compression))
            continue
        group = groups.setdefault(parameter.dtype, [])
        group.append((name, parameter))
        if sum(p.nbytes for _, p in group) > _BUCKET_BYTES:
            close(parameter.dtype)
    for dtype in list(groups):
        close(dtype)
    return buckets


def sparse_parameters(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """Yield the parameters of a module whose gradients are sparse."""
    for layer in module.modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse:
            yield from layer.parameters(recurse=False)
