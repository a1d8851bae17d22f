"""Process group of ``torch.distributed`` whose operations run over Horovod.

Importing this module registers the backend ``"horovod"``. Horovod must be initialized first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch.operations import CARRIED_AS

# These modules do not declare their names for type checkers.
dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d
_c10d_bindings: Any = torch._C._distributed_c10d

# All ranks count alike.
_numbers = itertools.count()

# Horovod's own thread cannot write to tensors that inference mode has made.
_outside_inference_mode = torch.inference_mode(False)


class HorovodGroup(dist.ProcessGroup):
    """Process group of all ranks of Horovod.

    Ranks must start the same operations in the same order. An operation ends before its call
    returns, also with ``async_op``, except for `allreduce_named`.

    Parameters
    ----------
    rank, size : int
        The rank's number in the group, and the number of ranks.

    Attributes
    ----------
    uses_nccl : bool
        Whether NCCL reduces on GPUs.

    Raises
    ------
    ParamError
        If the group has not all ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        import horovod.torch as hvd

        if size != hvd.size():
            raise ParamError(_unsupported(f"groups of {size} out of {hvd.size()} ranks"))
        self._hvd = hvd
        self._ops = {
            c10d.ReduceOp.SUM: hvd.Sum,
            c10d.ReduceOp.AVG: hvd.Average,
            c10d.ReduceOp.MIN: hvd.Min,
            c10d.ReduceOp.MAX: hvd.Max,
            c10d.ReduceOp.PRODUCT: hvd.Product,
        }
        self._named_ops = {"mean": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        self.uses_nccl = bool(hvd.nccl_built())
        self._prefix = f"group.{next(_numbers)}"

    def getBackendName(self) -> str:
        """Return the backend's name. torch calls this method."""
        return "horovod"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in place."""
        op = self._op(opts or c10d.AllreduceOptions())
        for tensor in tensors:
            _copy(tensor, self._reduced(tensor, op))
        return _ended(tensors)

    def allreduce_named(self, tensor: torch.Tensor, op: str, name: str) -> Callable[[], Any]:
        """Start the reduction of a tensor, as `Collectives.reduce_async`.

        Called directly, because works and options cost a fifth of the step of a small network.
        """
        handle = self._hvd.allreduce_async_(tensor, name=name, op=self._named_ops[op])
        return lambda: self._hvd.synchronize(handle)

    @_outside_inference_mode
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Overwrite each tensor with the root's."""
        for tensor in tensors:
            sent = _bytes(tensor)
            name = self._name("broadcast", sent)
            _fill([tensor], self._hvd.broadcast_(sent, opts.rootRank, name=name))
        return _ended(tensors)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Gather each tensor into one list of tensors."""
        for tensor, parts in zip(tensors, outputs, strict=True):
            self._gather(tensor, parts)
        return _ended(outputs[0])

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Gather a tensor into one tensor."""
        self._gather(tensor, [output])
        return _ended([output])

    def reduce_scatter(self, outputs: Any, lists: Any, opts: Any = None) -> Any:
        """Reduce lists of tensors over the ranks; each rank keeps its part."""
        op = self._op(opts or c10d.ReduceScatterOptions())
        for output, parts in zip(outputs, lists, strict=True):
            # Horovod's own operation has no minimum and no maximum.
            _copy(output, self._reduced(torch.stack(parts), op)[self.rank()])
        return _ended(outputs)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Reduce a tensor over the ranks; each rank keeps its part."""
        parts = [*tensor.reshape(self.size(), *output.shape)]
        return self.reduce_scatter([output], [parts], opts)

    def alltoall(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Send one tensor to each rank, and receive one from each."""
        self._exchange(outputs, tensors)
        return _ended(outputs)

    def all_to_all_single(
        self, output: Any, tensor: Any, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> Any:
        """Send rows of one tensor to each rank, and receive rows of each."""
        parts = tensor.split(list(sizes)) if sizes else tensor.chunk(self.size())
        received = output.split(list(output_sizes)) if output_sizes else output.chunk(self.size())
        self._exchange(received, parts)
        return _ended([output])

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self.allreduce([torch.zeros(1)])

    def send(self, *args: Any) -> Any:
        """Raise ParamError, because Horovod sends nothing to single ranks."""
        raise ParamError(_unsupported("operations with a single rank, except for broadcasts"))

    recv = recv_anysource = reduce = gather = scatter = send

    # Names of these operations in other versions of torch, and of variants.
    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _op(self, opts: Any) -> Any:
        for op, horovods in self._ops.items():
            if opts.reduceOp == op:
                return horovods
        raise ParamError(_unsupported(f"reductions by {opts.reduceOp}"))

    def _name(self, kind: str, tensor: torch.Tensor) -> str:
        """Return a name that is the same on all ranks. It repeats, which is faster."""
        shape = "x".join(map(str, tensor.shape))
        return f"{self._prefix}.{kind}.{str(tensor.dtype).removeprefix('torch.')}.{shape}"

    @_outside_inference_mode
    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """Return the reduction of a tensor, which may be overwritten, as `_carried`."""
        carried = _carried(tensor)
        name = self._name("allreduce", carried)
        reduced: torch.Tensor = self._hvd.allreduce_(carried, name=name, op=op)
        return reduced

    @_outside_inference_mode
    def _gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        name = f"{self._prefix}.allgather"
        _fill(outputs, self._hvd.allgather(_bytes(tensor), name=name))

    @_outside_inference_mode
    def _exchange(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        sent = [_bytes(part) for part in parts]
        sizes, name = [part.numel() for part in sent], f"{self._prefix}.alltoall"
        received, _ = self._hvd.alltoall(torch.cat(sent), sizes, name=name)
        _fill(outputs, received)


def _ended(outputs: Sequence[torch.Tensor]) -> Any:
    """Return the work of an operation that has ended."""
    future: Any = torch.futures.Future()
    future.set_result(list(outputs))
    return _c10d_bindings._create_work_from_future(future)


def _unsupported(what: str) -> str:
    return f"Horovod has no {what}. Set collectives='torch', which has all of torch.distributed."


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that Horovod can reduce in place: the same one, or a copy."""
    carried = tensor.detach().resolve_conj()
    if tensor.is_inference():
        carried = carried.clone()
    if carried.is_complex():
        carried = torch.view_as_real(carried)
    return carried.to(CARRIED_AS.get(carried.dtype, carried.dtype)).contiguous()


def _copy(output: torch.Tensor, result: torch.Tensor) -> None:
    """Overwrite a tensor with a result of `_carried` form, unless they share memory."""
    with torch.inference_mode(output.is_inference()), torch.no_grad():
        target = torch.view_as_real(output) if output.is_complex() else output
        if result.data_ptr() != target.data_ptr() or result.dtype != target.dtype:
            target.copy_(result.reshape(target.shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, which share its memory if it is contiguous."""
    given = tensor.detach().clone() if tensor.is_inference() else tensor.detach()
    return given.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _fill(outputs: Sequence[torch.Tensor], received: torch.Tensor) -> None:
    """Overwrite tensors with bytes, one after another, unless they share memory."""
    for output, part in (
        zip(outputs, received.split([output.nbytes for output in outputs]), strict=True)
        if outputs
        else ()
    ):
        if part.data_ptr() == output.data_ptr():
            continue
        aligned = part.clone() if part.storage_offset() % output.element_size() else part
        with torch.inference_mode(output.is_inference()), torch.no_grad():
            output.copy_(aligned.view(output.dtype).view(output.shape))


def _create(store: Any, rank: int, size: int, timeout: Any) -> HorovodGroup:
    return HorovodGroup(rank, size)


dist.Backend.register_backend("horovod", _create, devices=["cpu", "cuda"])
