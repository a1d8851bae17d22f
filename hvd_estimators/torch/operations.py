"""Operations of a rank over its process group: the same for Gloo, NCCL and Horovod.

Operations of ``torch.distributed`` have no names. Therefore all ranks must start the same
operations in the same order.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d

from hvd_estimators.exceptions import CollectiveError

# The module does not declare its names for type checkers.
c10d: Any = torch.distributed.distributed_c10d

CARRIED_AS = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}
"""Transport dtypes for dtypes that Horovod or Gloo does not support or cannot sum."""


_OPS = {
    "mean": c10d.ReduceOp.SUM,
    "sum": c10d.ReduceOp.SUM,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
}

# Up to these bytes of all ranks, Gloo gathers a tensor instead of reducing it: in half the steps.
_MOST_DIRECT_BYTES = 2**18


class Places(NamedTuple):
    """Numbers of a rank, see `Collectives`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int


class Collectives:
    """Interface between a rank and the other ranks of its job.

    All ranks call the same methods in the same order, from one thread at a time. Methods whose
    names end in ``_async`` only start an operation. They return a function that waits for the
    operation and returns its result. Operations are ``"mean"``, ``"sum"``, ``"min"`` and ``"max"``.
    Tensors are contiguous and of dtypes that `CARRIED_AS` does not convert, on the CPU or on the
    rank's GPU. ``name`` identifies an operation in messages, and is the same on all ranks.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Group of all ranks.
    places : Places
        The rank's numbers.
    library : str
        The library's name in messages.
    uses_nccl : bool
        Whether NCCL reduces on GPUs.

    Attributes
    ----------
    rank, size : int
        This rank's number and the number of ranks.
    local_rank, local_size : int
        This rank's number among the ranks of its machine, and their number.
    node_rank : int
        The machine's number.
    """

    base_store: Any = None

    def __init__(self, group: Any, places: Places, library: str, uses_nccl: bool) -> None:
        self._group = group
        self.rank, self.size, self.local_rank, self.local_size, self.node_rank = places
        self.library, self.uses_nccl = library, uses_nccl
        self._is_horovod = library == "Horovod"

    def reduce(self, tensor: torch.Tensor, op: str, name: str = "reduce") -> torch.Tensor:
        """Return a tensor's reduction over the ranks."""
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self.reduce_async(copied, op, name)()

    def reduce_async(self, tensor: torch.Tensor, op: str, name: str) -> Callable[[], torch.Tensor]:
        """Start the reduction of a tensor, which the result overwrites."""
        if self._is_horovod:
            started: Callable[[], torch.Tensor] = self._group.allreduce_named(tensor, op, name)
            return started
        is_small = tensor.nbytes * self.size <= _MOST_DIRECT_BYTES
        if is_small and not self._waits_on_gpu(tensor):
            wait = self._reduce_directly(tensor, op, name)
        else:
            wait = self._all_reduce(tensor, op, name)

        def finish() -> torch.Tensor:
            wait()
            return tensor.div_(self.size) if op == "mean" else tensor

        return finish

    def average_sparse_async(self, tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        """Start the average of a sparse tensor: first, ranks exchange the numbers of its rows."""
        own = tensor.detach().coalesce()
        counts = self._gather_counts(own.indices().shape[1], name)

        def finish() -> torch.Tensor:
            rows = counts()
            indices = self._gather_rows(own.indices().t().contiguous(), rows, f"{name}.indices")
            values = own.values()
            carried = values.to(CARRIED_AS.get(values.dtype, values.dtype)).contiguous()
            total = self._gather_rows(carried, rows, name).div_(self.size).to(values.dtype)
            shape = own.shape
            return torch.sparse_coo_tensor(indices.t(), total, shape, check_invariants=False)

        return finish

    def gather(self, tensor: torch.Tensor, name: str = "gather") -> torch.Tensor:
        """Return the ranks' tensors, concatenated along their first dimension, which may differ."""
        rows = self._gather_counts(tensor.shape[0], name)()
        return self._gather_rows(tensor.detach(), rows, name)

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite tensors with rank 0's."""
        waits = [
            self._broadcast(tensor.detach(), name)
            for name, tensor in tensors.items()
            if tensor.numel()
        ]
        for wait in waits:
            wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.reduce(torch.zeros(1), "sum", "barrier")

    def _gather_counts(self, count: int, name: str) -> Callable[[], list[int]]:
        """Start a gather of one number per rank."""
        counts = self._gather_equal(torch.tensor([count]), f"{name}.counts")
        return lambda: [int(number) for number in counts()]

    def _waits_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return whether NCCL reduces a tensor: then the GPU waits, not this thread."""
        return tensor.device.type == "cuda" and self.uses_nccl

    def _reduce_directly(self, tensor: torch.Tensor, op: str, name: str) -> Callable[[], None]:
        """Start a reduction in which each rank combines the tensors of all, in their order."""
        gathered = self._gather_equal(tensor, name)
        combine = {"min": torch.minimum, "max": torch.maximum}.get(op, torch.add)

        def wait() -> None:
            first, *others = gathered()
            tensor.copy_(first)
            for other in others:
                combine(tensor, other, out=tensor)

        return wait

    def _all_reduce(self, tensor: torch.Tensor, op: str, name: str) -> Callable[[], None]:
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._waiting(self._group.allreduce([tensor], options), name)

    def _broadcast(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self._group.broadcast([tensor], options)
        return self._waiting(work, name)

    def _gather_equal(
        self, tensor: torch.Tensor, name: str
    ) -> Callable[[], Sequence[torch.Tensor]]:
        """Start a gather of tensors with the same shape on all ranks."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        parts = list(gathered.unbind(0))
        work = self._group.allgather([parts], [tensor])
        wait = self._waiting(work, name)

        def finish() -> Sequence[torch.Tensor]:
            wait()
            return parts

        return finish

    def _gather_rows(self, tensor: torch.Tensor, rows: Sequence[int], name: str) -> torch.Tensor:
        """Return concatenated tensors, given the number of each rank's rows."""
        most, row = max(rows), tensor.shape[1:]
        if not most or not row.numel():
            return tensor.new_empty((sum(rows), *row))
        padded = tensor
        if tensor.shape[0] < most:
            padded = tensor.new_zeros((most, *row))
            padded[: tensor.shape[0]] = tensor
        parts = self._gather_equal(padded, name)()
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def _waiting(self, work: Any, name: str) -> Callable[[], None]:
        """Return a function that waits for an operation, which holds its tensors."""
        if self._is_horovod:
            waits: Callable[[], None] = work.wait
            return waits

        def wait() -> None:
            with naming_lost_ranks(name):
                work.wait()

        return wait


@contextlib.contextmanager
def naming_lost_ranks(name: str | None = None) -> Iterator[None]:
    """Raise errors of an operation as `CollectiveError`, with its name.

    Without a name, errors of the user's own operations; other errors pass unchanged.
    """
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        is_known = type(error).__name__ in ("CollectiveError", "HorovodInternalError")
        if is_known or (name is None and not _BROKEN.search(str(error))):
            raise
        what = "An operation of torch.distributed" if name is None else repr(name)
        raise CollectiveError(
            f"{what} failed, probably because another rank has ended or hangs: {error}"
        ) from error


# In messages of Gloo, NCCL and Horovod; torch's errors have no type of their own.
_BROKEN = re.compile(r"/gloo/|NCCL error|HorovodInternalError")
