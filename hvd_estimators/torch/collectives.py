"""Collectives for torch ranks: objects, tensors, numbers and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.launch.gpus import check_gpus, describe_gpus, gpu_index, own_gpu
from hvd_estimators.store.base import RunPaths
from hvd_estimators.training.object_collectives import Bytes, ObjectExchange
from hvd_estimators.training.progress import notify_driver
from hvd_estimators.training.spec import check_equal_weights, weight_digest

__all__ = [
    "CARRIED_AS",
    "PendingSum",
    "average_batch_norm",
    "batch_norm_statistics",
    "bits_of",
    "broadcast_tensors",
    "check_same_weights",
    "choose_device",
    "exchange",
    "gather_tensor",
    "not_finite",
    "reduce_tensor",
    "sum_over_ranks",
    "sum_tensor",
    "weight_digests",
]


def _gather_bytes(document: Bytes, name: str) -> Bytes:
    own = torch.from_numpy(document.copy())
    gathered: Bytes = hvd.allgather(own, name=name).numpy()
    return gathered


# Lightning validates in inference mode. Horovod's own thread cannot write to tensors created in it.
_outside_inference_mode = torch.inference_mode(False)


class _TensorExchange(ObjectExchange):
    """Exchange of objects that may contain tensors; also works in inference mode."""

    gather = _outside_inference_mode(ObjectExchange.gather)
    broadcast = _outside_inference_mode(ObjectExchange.broadcast)


exchange = _TensorExchange(hvd.rank, hvd.size, _gather_bytes)


def average_batch_norm(module: torch.nn.Module) -> None:
    """Set batch normalization's running statistics to their mean over the ranks."""
    statistics = batch_norm_statistics(module)
    if statistics and hvd.size() > 1:
        hvd.grouped_allreduce_(statistics, name="batch_norm", op=hvd.Average)


def batch_norm_statistics(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the running statistics of a module's batch normalization layers."""
    return [
        buffer
        for layer in module.modules()
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase)
        for buffer in (layer.running_mean, layer.running_var)
        if buffer is not None
    ]


def not_finite(
    module: torch.nn.Module, losses: Iterable[torch.Tensor | None]
) -> tuple[float | None, list[str]]:
    """Return a NaN or infinite loss, if any, and the names of parameters with such values.

    Reads each parameter once. If all values are finite, waits for the GPU only once.

    Parameters
    ----------
    module : torch.nn.Module
        Module with the parameters to check.
    losses : iterable of torch.Tensor or None
        Scalars.
    """
    given = [loss for loss in losses if loss is not None]
    sums = [_sum(tensor.detach()) for tensor in (*given, *module.parameters())]
    if not sums or bool(torch.isfinite(torch.stack(sums)).all()):
        return None, []
    # A sum may overflow although all values are finite.
    loss = next((float(loss) for loss in given if not torch.isfinite(loss).all()), None)
    named = module.named_parameters()
    return loss, [name for name, value in named if not bool(torch.isfinite(value).all())]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor; the sum is finite only if all values are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point() and tensor.element_size() < 4:
        return tensor.sum(dtype=torch.float32).double()
    return tensor.sum().double()


CARRIED_AS = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}
"""Transport dtypes for dtypes that Horovod does not support or cannot sum."""


def choose_device(use_gpu: bool, verbose: int = 1) -> torch.device:
    """Return this rank's GPU, or the CPU if no rank has a GPU. Called by all ranks.

    Parameters
    ----------
    use_gpu : bool
        Whether to use GPUs.
    verbose : int
        From 1 upwards, rank 0 reports the GPUs to the driver.

    Raises
    ------
    GpuError
        If only some ranks have a GPU, or if two ranks share one and NCCL would reduce.
    """
    visible = torch.cuda.device_count() if use_gpu and torch.cuda.is_available() else 0
    index = gpu_index(visible, hvd.local_rank())
    gpus = exchange.gather(None if index is None else own_gpu(index), "hvd_estimators.gpus")
    check_gpus([gpu is not None for gpu in gpus])
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    line = describe_gpus(gpus, torch.cuda.get_device_name(index), bool(hvd.nccl_built()))
    if hvd.rank() == 0:
        notify_driver(line, verbose)
    return torch.device("cuda", index)


def broadcast_tensors(tensors: Mapping[str, Any]) -> None:
    """Overwrite tensors with those of rank 0, for any dtypes and strides.

    Called by all ranks.

    Parameters
    ----------
    tensors : mapping
        Tensors by name, such as a ``state_dict()``. Other values are ignored.
    """
    if hvd.size() == 1:
        return
    given = {
        name: torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }
    carried = {
        name: t.to(CARRIED_AS.get(t.dtype, t.dtype)).contiguous() for name, t in given.items()
    }
    hvd.broadcast_parameters(carried, root_rank=0)
    for name, tensor in given.items():
        if carried[name] is not tensor:
            tensor.copy_(carried[name])


@_outside_inference_mode
def sum_over_ranks(value: float, name: str = "step_weight") -> float:
    """Sum one number per rank, exactly in 64 bits. Called by all ranks.

    Parameters
    ----------
    value : float
        This rank's number.
    name : str
        Name of the reduction; the same on all ranks.
    """
    own = torch.tensor([value], dtype=torch.float64)
    return float(hvd.allreduce(own, name=name, op=hvd.Sum))


def reduce_tensor(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce a tensor of any dtype with ``mean``, ``avg``, ``sum``, ``min`` or ``max``.

    Called by all ranks. The mean of integers is a float64 tensor, because it may not be an integer.
    """
    reductions = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
    reductions["mean"] = reductions["avg"] = hvd.Average
    if op not in reductions:
        raise ValueError(
            f"reduce_op: expected one of 'mean', 'sum', 'min' and 'max', found {op!r}."
        )
    if op in ("mean", "avg") and not tensor.is_floating_point():
        tensor = tensor.double()
    with torch.inference_mode(False):
        reduced: torch.Tensor = hvd.allreduce(_carried(tensor).contiguous(), op=reductions[op])
        return reduced.to(tensor.dtype)


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Stack the ranks' tensors of any dtype along a new first dimension. Called by all ranks."""
    with torch.inference_mode(False):
        gathered: torch.Tensor = hvd.allgather(_carried(tensor).unsqueeze(0).contiguous())
        return gathered.to(tensor.dtype)


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that Horovod can transport and write to."""
    usable = tensor.clone() if tensor.is_inference() else tensor
    return usable.to(CARRIED_AS.get(tensor.dtype, tensor.dtype))


def sum_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Sum one tensor per rank, on its device. Called by all ranks.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's tensor, of the same shape and dtype on all ranks.
    name : str
        Name of the reduction; the same on all ranks.
    """
    # Horovod is not initialized in a dry run on the driver.
    if not hvd.is_initialized() or hvd.size() == 1:
        return tensor
    total: torch.Tensor = hvd.allreduce(tensor, name=name, op=hvd.Sum)
    return total


class PendingSum:
    """Asynchronous sum of a tensor over the ranks. All ranks must create it.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's tensor, of the same shape and dtype on all ranks.
    name : str
        Name of the reduction; the same on all ranks.
    """

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._handle = (
            None if hvd.size() == 1 else hvd.allreduce_async(tensor, name=name, op=hvd.Sum)
        )
        self._total: torch.Tensor = tensor

    def value(self) -> torch.Tensor:
        """Wait for the sum, and return it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._total = hvd.synchronize(handle)
        return self._total


def weight_digests(module: torch.nn.Module) -> dict[str, str]:
    """Return a digest of each parameter by name; equal digests mean equal bits."""
    return {name: weight_digest(bits_of(value)) for name, value in module.named_parameters()}


def check_same_weights(module: torch.nn.Module, epoch: int, run: RunPaths) -> None:
    """Reject weights that differ between ranks, after the first epoch. Called by all ranks.

    Raises
    ------
    HvdEstimatorsError
        If the weights differ.
    """
    if hvd.size() > 1:
        gathered = exchange.gather(weight_digests(module), "hvd_estimators.weights")
        check_equal_weights(gathered, epoch, run)


def bits_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bits, for a digest."""
    bits: Bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return bits
