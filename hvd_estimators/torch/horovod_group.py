"""Process group of ``torch.distributed`` whose operations run over Horovod.

Importing this module registers the backend ``"horovod"``. Horovod must be initialized first.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
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

# Names repeat after so many operations, because Horovod agrees faster on names that it has seen.
# Operations with equal names must not overlap.
_MOST_IN_FLIGHT = 64

# All ranks count alike.
_numbers = itertools.count()

_Finish = Callable[[], Sequence[torch.Tensor]]


class HorovodGroup(dist.ProcessGroup):
    """Process group of all ranks of Horovod.

    Ranks must start the same operations in the same order. A thread waits for them, so that futures
    complete without the caller. This package gives names to its own reductions, which Horovod shows
    in messages; their caller waits without that thread.

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
        self._counts: collections.Counter[str] = collections.Counter()
        self._places = threading.Semaphore(_MOST_IN_FLIGHT)
        self._started: queue.SimpleQueue[tuple[_Finish, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def getBackendName(self) -> str:
        """Return the backend's name. torch calls this method."""
        return "horovod"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in place."""
        op = self._op(opts or c10d.AllreduceOptions())
        return self._work([self._reduce(tensor, tensor, op) for tensor in tensors])

    def allreduce_named(self, tensor: torch.Tensor, op: str, name: str) -> Callable[[], Any]:
        """Start the reduction of a tensor, as `Collectives.reduce_async`.

        Called directly, because works and options cost a fifth of the step of a small network.
        """
        handle = self._hvd.allreduce_async_(tensor, name=name, op=self._named_ops[op])
        return lambda: self._hvd.synchronize(handle)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce each tensor over the ranks; only the root's is overwritten."""
        is_root = opts.rootRank == self.rank()
        outputs = tensors if is_root else [torch.empty_like(tensor) for tensor in tensors]
        op = self._op(opts)
        pairs = zip(tensors, outputs, strict=True)
        return self._work([self._reduce(own, output, op) for own, output in pairs])

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Overwrite each tensor with the root's."""
        return self._work([self._broadcast(own, opts.rootRank) for own in tensors])

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Gather each tensor into one list of tensors."""
        pairs = zip(tensors, outputs, strict=True)
        return self._work([self._gather(tensor, parts) for tensor, parts in pairs])

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Gather a tensor into one tensor."""
        return self._work([self._gather(tensor, [output])])

    def all_gather_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Gather each tensor into one tensor."""
        pairs = zip(tensors, outputs, strict=True)
        return self._work([self._gather(tensor, [output]) for tensor, output in pairs])

    def gather(self, outputs: Any, tensors: Any, opts: Any) -> Any:
        """Gather each tensor into one list of tensors of the root."""
        lists = outputs if opts.rootRank == self.rank() else [[] for _ in tensors]
        pairs = zip(tensors, lists, strict=True)
        return self._work([self._gather(tensor, parts) for tensor, parts in pairs])

    def scatter(self, outputs: Any, lists: Any, opts: Any) -> Any:
        """Overwrite each tensor with its part of the root's list."""
        given = lists if opts.rootRank == self.rank() else [[] for _ in outputs]
        nothing = [torch.empty(0)] * self.size()
        pairs = zip(outputs, given, strict=True)
        return self._work([self._exchange([out], parts or nothing) for out, parts in pairs])

    def reduce_scatter(self, outputs: Any, lists: Any, opts: Any = None) -> Any:
        """Reduce lists of tensors over the ranks; each rank keeps its part."""
        op = self._op(opts or c10d.ReduceScatterOptions())
        pairs = zip(outputs, lists, strict=True)
        return self._work([self._reduce_scatter(out, torch.stack(p), op) for out, p in pairs])

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Reduce a tensor over the ranks; each rank keeps its part."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Reduce each tensor over the ranks; each rank keeps its part."""
        op = self._op(opts or c10d.ReduceScatterOptions())
        pairs = zip(outputs, tensors, strict=True)
        return self._work(
            [self._reduce_scatter(o, t.reshape(self.size(), *o.shape), op) for o, t in pairs]
        )

    def alltoall(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Send one tensor to each rank, and receive one from each."""
        return self._work([self._exchange(outputs, tensors)])

    def all_to_all_single(
        self, output: Any, tensor: Any, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> Any:
        """Send rows of one tensor to each rank, and receive rows of each."""
        parts = tensor.split(list(sizes)) if sizes else tensor.chunk(self.size())
        received = output.split(list(output_sizes)) if output_sizes else output.chunk(self.size())
        return self._work([self._exchange(received, parts)])

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self.allreduce([torch.zeros(1)])

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        """Raise ParamError, because Horovod sends nothing to single ranks."""
        raise ParamError(_unsupported("send and recv"))

    recv = recv_anysource = send

    # Names of these operations in other versions of torch, and of variants.
    allreduce_coalesced = allreduce
    allgather_coalesced = allgather
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def shutdown(self) -> None:
        """End the thread once all operations have ended. torch calls this method."""
        if self._thread is not None:
            self._started.put(None)
            self._thread.join()
            self._thread = None

    abort = shutdown

    def _op(self, opts: Any) -> Any:
        for op, horovods in self._ops.items():
            if opts.reduceOp == op:
                return horovods
        raise ParamError(_unsupported(f"reductions by {opts.reduceOp}"))

    def _name(self, kind: str, tensor: torch.Tensor, is_same_shape: bool = True) -> str:
        """Return an unused name that is the same on all ranks, and wait if too many are used."""
        self._places.acquire()
        shape = "x".join(map(str, tensor.shape)) if is_same_shape else ""
        key = f"{self._prefix}.{kind}.{str(tensor.dtype).removeprefix('torch.')}.{shape}"
        self._counts[key] += 1
        return f"{key}.{self._counts[key] % _MOST_IN_FLIGHT}"

    def _finishing(self, handle: int, finish: Callable[[Any], None]) -> Callable[[], None]:
        def wait() -> None:
            try:
                finish(self._hvd.synchronize(handle))
            finally:
                self._places.release()

        return wait

    def _reduce(self, tensor: torch.Tensor, output: torch.Tensor, op: Any) -> Any:
        with torch.inference_mode(False):
            carried = _carried(tensor, tensor is not output)
            name = self._name("allreduce", carried)
            handle = self._hvd.allreduce_async_(carried, name=name, op=op)
        return output, self._finishing(handle, lambda total: _copy(output, total))

    def _reduce_scatter(self, output: torch.Tensor, stacked: torch.Tensor, op: Any) -> Any:
        with torch.inference_mode(False):
            carried = _carried(stacked, is_copied=True)
            name = self._name("reducescatter", carried)
            if op in (self._hvd.Sum, self._hvd.Average):
                handle = self._hvd.reducescatter_async(carried, name=name, op=op)
                own = 0
            else:
                handle = self._hvd.allreduce_async_(carried, name=name, op=op)
                own = self.rank()
        return output, self._finishing(handle, lambda parts: _copy(output, parts[own]))

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        with torch.inference_mode(False):
            sent = _bytes(tensor)
            handle = self._hvd.broadcast_async_(sent, root, name=self._name("broadcast", sent))
        return tensor, self._finishing(handle, lambda part: _fill([tensor], part))

    def _gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Any:
        with torch.inference_mode(False):
            sent = _bytes(tensor)
            name = self._name("allgather", sent, is_same_shape=False)
            handle = self._hvd.allgather_async(sent, name=name)
        finish = self._finishing(handle, lambda gathered: _fill(outputs, gathered))
        return (*outputs, tensor)[0], finish

    def _exchange(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Any:
        with torch.inference_mode(False):
            sent = [_bytes(part) for part in parts]
            flat = torch.cat(sent)
            name = self._name("alltoall", flat, is_same_shape=False)
            handle = self._hvd.alltoall_async(flat, [part.numel() for part in sent], name=name)
        finish = self._finishing(handle, lambda received: _fill(outputs, received[0]))
        return outputs[0], finish

    def _work(self, started: Sequence[tuple[torch.Tensor, Callable[[], None]]]) -> Any:
        """Return the work of operations that have started."""
        future: Any = torch.futures.Future()

        def finish() -> Sequence[torch.Tensor]:
            for _, wait in started:
                wait()
            return [output for output, _ in started]

        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        self._started.put((finish, future))
        return _c10d_bindings._create_work_from_future(future)

    def _wait(self) -> None:
        while (started := self._started.get()) is not None:
            finish, future = started
            try:
                outputs = finish()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(outputs)


def _unsupported(what: str) -> str:
    return f"Horovod has no {what}. Set collectives='torch', which has all of torch.distributed."


def _carried(tensor: torch.Tensor, is_copied: bool) -> torch.Tensor:
    """Return a tensor that Horovod can reduce in place: the same one, or a copy."""
    carried = tensor.detach().resolve_conj()
    if is_copied or tensor.is_inference():
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
