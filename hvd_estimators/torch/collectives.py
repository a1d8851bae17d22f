"""Collectives for torch ranks: sessions, and functions for objects, numbers and statistics.

`hvd_estimators.torch.process_group` makes the process group, and
`hvd_estimators.torch.operations` has the operations on tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvd_estimators.launch.gpus import check_gpus, describe_gpus, gpu_index, own_gpu
from hvd_estimators.store.base import RunPaths
from hvd_estimators.torch.operations import CARRIED_AS, Collectives, naming_lost_ranks
from hvd_estimators.torch.process_group import (
    connect_until_replaced,
    connected,
    leave_replaceable_group,
)
from hvd_estimators.torch.sharding import is_sharded, local_part
from hvd_estimators.training.collectives_choice import choose_collectives
from hvd_estimators.training.object_collectives import Bytes, ObjectExchange
from hvd_estimators.training.progress import notify_driver
from hvd_estimators.training.spec import check_equal_weights, weight_digest


class _Active:
    """The collectives of this process."""

    collectives: Collectives | None = None


def current() -> Collectives:
    """Return the collectives of this rank.

    Raises
    ------
    RuntimeError
        Outside of a `session`.
    """
    if _Active.collectives is None:
        raise RuntimeError("This process has no connection to other ranks.")
    return _Active.collectives


@contextlib.contextmanager
def using(collectives: Collectives) -> Iterator[Collectives]:
    """Make collectives the current ones for the duration of the block."""
    before, _Active.collectives = _Active.collectives, collectives
    try:
        yield collectives
    finally:
        _Active.collectives = before


@contextlib.contextmanager
def session(
    kind: str, mp_start_method: str | None = None, ranks: int | None = None, use_gpu: bool = True
) -> Iterator[Collectives]:
    """Connect this rank to the others for the duration of the block. Called by all ranks.

    Parameters
    ----------
    kind : str
        ``"horovod"`` or ``"torch"``, the same on all ranks.
    mp_start_method : str or None
        Start method of ``multiprocessing``; None does not change it.
    ranks : int, optional
        Number of ranks among which the rows were divided.
    use_gpu : bool
        Whether ranks use GPUs.

    Raises
    ------
    DependencyError
        If this machine has no Horovod for its torch, and ``kind`` is ``"horovod"``.
    RuntimeError
        If the number of ranks differs from ``ranks``.
    """
    if leave_replaceable_group():
        # `connect` makes another group.
        _Active.collectives = None
    with (
        connected(kind, mp_start_method, ranks, use_gpu) as collectives,
        using(collectives),
        naming_lost_ranks(),
    ):
        yield collectives


def connect() -> None:
    """Connect this process to the other ranks until it ends, unless a `session` has done so.

    For Trainers that users create.
    """
    if _Active.collectives is None:
        kind, _ = choose_collectives("auto")
        _Active.collectives = connect_until_replaced(kind)


def gather_bytes(document: Bytes, name: str) -> Bytes:
    """Return the concatenated bytes of all ranks, whose lengths may differ."""
    gathered: Bytes = current().gather(torch.from_numpy(document.copy()), name).numpy()
    return gathered


# Lightning validates in inference mode. Horovod's own thread cannot write to tensors created in it.
_outside_inference_mode = torch.inference_mode(False)


class _TensorExchange(ObjectExchange):
    """Exchange of objects that may contain tensors; also works in inference mode."""

    gather = _outside_inference_mode(ObjectExchange.gather)
    broadcast = _outside_inference_mode(ObjectExchange.broadcast)


exchange = _TensorExchange(lambda: current().rank, lambda: current().size, gather_bytes)


def reduce_group_async(
    tensors: Sequence[torch.Tensor], op: str, name: str
) -> Callable[[], list[torch.Tensor]]:
    """Start one reduction of several tensors for each dtype and device.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Tensors of any strides, which are copied. Shapes and order are the same on all ranks.
    op, name : str
        The operation and its name, see `Collectives`.

    Returns
    -------
    callable
        Waits, and returns the results: contiguous tensors that share memory with each other.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    started = []
    for number, members in enumerate(groups.values()):
        flat = torch.cat([tensors[index].detach().reshape(-1) for index in members])
        part_name = f"{name}.{number}" if number else name
        started.append((members, current().reduce_async(flat, op, part_name)))
    shapes = [tensor.shape for tensor in tensors]

    def finish() -> list[torch.Tensor]:
        results: list[Any] = [None] * len(shapes)
        for members, wait in started:
            parts = wait().split([shapes[index].numel() for index in members])
            for index, part in zip(members, parts, strict=True):
                results[index] = part.view(shapes[index])
        return results

    return finish


@_outside_inference_mode
def reduce_group(tensors: Sequence[torch.Tensor], op: str, name: str) -> None:
    """Overwrite tensors with their reduction over the ranks; see `reduce_group_async`."""
    for tensor, reduced in zip(tensors, reduce_group_async(tensors, op, name)(), strict=True):
        tensor.detach().copy_(reduced)


def average_batch_norm(module: torch.nn.Module) -> None:
    """Set batch normalization's running statistics to their mean over the ranks."""
    statistics = batch_norm_statistics(module)
    if statistics and current().size > 1:
        reduce_group(statistics, "mean", "batch_norm")


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
    parameters = map(local_part, module.parameters())
    sums = [_sum(tensor.detach()) for tensor in (*given, *parameters)]
    if not sums or bool(torch.isfinite(torch.stack(sums)).all()):
        return None, []
    # A sum may overflow although all values are finite.
    loss = next((float(loss) for loss in given if not torch.isfinite(loss).all()), None)
    named = ((name, local_part(value)) for name, value in module.named_parameters())
    return loss, [name for name, value in named if not bool(torch.isfinite(value).all())]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor; the sum is finite only if all values are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point() and tensor.element_size() < 4:
        return tensor.sum(dtype=torch.float32).double()
    return tensor.sum().double()


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
    collectives = current()
    index = gpu_index(visible, collectives.local_rank)
    gpus = exchange.gather(None if index is None else own_gpu(index), "hvd_estimators.gpus")
    check_gpus([gpu is not None for gpu in gpus])
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    line = describe_gpus(gpus, torch.cuda.get_device_name(index), collectives.uses_nccl)
    if collectives.rank == 0:
        notify_driver(f"{line} Collectives: {collectives.library}.", verbose)
    return torch.device("cuda", index)


def broadcast_tensors(tensors: Mapping[str, Any]) -> None:
    """Overwrite tensors with rank 0's, for any dtypes and strides.

    Called by all ranks.

    Parameters
    ----------
    tensors : mapping
        Tensors by name, such as a ``state_dict()``. Other values are ignored, and so are parts, and
        weights in files, which each rank reads.
    """
    if current().size == 1:
        return
    given = {
        name: torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and not (is_sharded(value) or value.is_meta)
    }
    carried = {
        name: t.to(CARRIED_AS.get(t.dtype, t.dtype)).contiguous() for name, t in given.items()
    }
    current().broadcast(carried)
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
    return float(current().reduce(own, "sum", name))


def sum_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Sum one tensor per rank, on its device. Called by all ranks.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's tensor, of the same shape and dtype on all ranks.
    name : str
        Name of the reduction; the same on all ranks.
    """
    # A dry run on the driver has no ranks.
    if _Active.collectives is None or current().size == 1:
        return tensor
    return current().reduce(tensor, "sum", name)


def weight_digests(module: torch.nn.Module) -> dict[str, str]:
    """Return a digest of each parameter that a rank holds whole; equal digests mean equal bits."""
    parameters = module.named_parameters()
    return {n: weight_digest(bits_of(value)) for n, value in parameters if not is_sharded(value)}


def check_same_weights(
    module: torch.nn.Module,
    epoch: int,
    run: RunPaths,
    outside: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Reject weights that differ between ranks, after the first epoch. Called by all ranks.

    Parameters
    ----------
    module : torch.nn.Module
        The trained module.
    epoch : int
        The epoch.
    run : RunPaths
        Paths of the run, for the message.
    outside : mapping, optional
        Further weights by name, such as a loss's. Default: none.

    Raises
    ------
    HvdEstimatorsError
        If the weights differ.
    """
    if current().size > 1:
        digests = weight_digests(module)
        for name, value in (outside or {}).items():
            digests[name] = weight_digest(bits_of(value))
        gathered = exchange.gather(digests, "hvd_estimators.weights")
        check_equal_weights(gathered, epoch, run)


def bits_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bits, for a digest."""
    bits: Bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return bits
