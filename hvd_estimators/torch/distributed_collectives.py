"""Collectives of torch ranks over ``torch.distributed``: Gloo, and NCCL on GPUs.

Ranks meet through the job's authenticated rendezvous, and make the default process group. All
operations go over it. Users' code may use the group, too.

An operation has no name in ``torch.distributed``. Therefore all ranks must start the same
operations in the same order.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d

from hvd_estimators.exceptions import CollectiveError, ParamError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.gpus import gpu_index, own_gpu
from hvd_estimators.launch.rank.hang_detection import hold_up_limits, not_taking_part
from hvd_estimators.launch.rendezvous.client import JOINED, RankClient
from hvd_estimators.torch.collectives import CARRIED_AS, Collectives
from hvd_estimators.torch.rendezvous_store import RendezvousStore
from hvd_estimators.training.horovod_session import check_ranks, set_start_method

logger = logging.getLogger(__name__)

# These modules do not declare their names for type checkers.
dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d

_OPS = {
    "mean": c10d.ReduceOp.SUM,
    "sum": c10d.ReduceOp.SUM,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
}

# Operations wait without a limit of Gloo's or NCCL's own, because a rank may read, validate or save
# for long. `hvd_estimators.launch.rank.hang_detection` explains the limits that hold instead.
_MOST_SECONDS = 365 * 86400.0
_END_LATER_SECONDS = 30.0
# A rank that waits for this time publishes the number of the operation that it waits for.
_PUBLISH_SECONDS = 5.0
# Up to these bytes of all ranks, Gloo gathers a tensor instead of reducing it: in half the steps.
_MOST_DIRECT_BYTES = 2**18
# Gathered tensors are padded to equal sizes, unless that would send much more.
_MOST_PADDING_BYTES = 2**20

# Each session of this process has its own keys. All ranks count alike.
_sessions = itertools.count()
# The newest closed group. A user's DistributedDataParallel also refers to it. If that object's
# destructor ended the group, it would hold the interpreter's lock, for which threads of the group
# may wait before they end.
_closed: list[Any] = []


class DistributedCollectives(Collectives):
    """Collectives over the default process group.

    Parameters
    ----------
    store : torch.distributed.Store or None
        Names the ranks that do not take part in an operation; None if nothing connects the ranks
        but their group.
    local_rank, local_size, node_rank : int
        See `Collectives`.
    is_own : bool
        Whether to close the group in `close`. The user's program may have made it.
    """

    library = "torch.distributed"
    base_store: Any = None

    def __init__(
        self, store: Any, local_rank: int, local_size: int, node_rank: int, is_own: bool
    ) -> None:
        self._group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.local_size = local_rank, local_size
        self.node_rank = node_rank
        self._store, self._is_own = store, is_own
        self._numbers = itertools.count()
        self._warn_after, self._end_after = hold_up_limits(os.environ)
        self.uses_nccl = "nccl" in dist.get_backend()

    def reduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        """Return a tensor's reduction over the ranks."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            reduced: torch.Tensor = _Reduce.apply(tensor, self, op, name)
            return reduced
        return self.reduce_async(_copied(tensor), op, name or "reduce")()

    def reduce_async(self, tensor: torch.Tensor, op: str, name: str) -> Callable[[], torch.Tensor]:
        """Start the reduction of a tensor, in place."""
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
        counts = self._gather_equal(torch.tensor([own.indices().shape[1]]), name)

        def finish() -> torch.Tensor:
            rows = [int(count) for count in counts()]
            indices = self._gather_rows(own.indices().t().contiguous(), rows, name)
            values = own.values()
            carried = values.to(CARRIED_AS.get(values.dtype, values.dtype)).contiguous()
            total = self._gather_rows(carried, rows, name).div_(self.size).to(values.dtype)
            shape = own.shape
            return torch.sparse_coo_tensor(indices.t(), total, shape, check_invariants=False)

        return finish

    def gather(self, tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along their first dimension."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            gathered: torch.Tensor = _Gather.apply(tensor, self, name)
            return gathered
        return self.gather_parts(tensor, name)[0]

    def gather_parts(
        self, tensor: torch.Tensor, name: str | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the ranks' concatenated tensors, and the length of each rank's part."""
        name = name or "gather"
        counts = self._gather_equal(torch.tensor([tensor.shape[0]]), name)
        rows = [int(count) for count in counts()]
        return self._gather_rows(tensor.detach(), rows, name), rows

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite tensors with rank 0's."""
        waits = [
            self._broadcast(tensor.detach(), 0, name)
            for name, tensor in tensors.items()
            if tensor.numel()
        ]
        for wait in waits:
            wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.reduce(torch.zeros(1), "sum", "barrier")

    def close(self) -> None:
        """Wait for all ranks, and close the connections to them."""
        # A rank that ended earlier would look lost to ranks that still receive.
        self.barrier()
        if self._is_own:
            _closed[:] = [self._group]
            dist.destroy_process_group()

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
        return self._waiting(self._group.allreduce([tensor], options), tensor, name)

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Callable[[], None]:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._waiting(self._group.broadcast([tensor], options), tensor, name)

    def _gather_equal(
        self, tensor: torch.Tensor, name: str
    ) -> Callable[[], Sequence[torch.Tensor]]:
        """Start a gather of tensors with the same shape on all ranks."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        parts = list(gathered.unbind(0))
        work = self._group.allgather([parts], [tensor])
        wait = self._waiting(work, tensor, name)

        def finish() -> Sequence[torch.Tensor]:
            wait()
            return parts

        return finish

    def _gather_rows(self, tensor: torch.Tensor, rows: Sequence[int], name: str) -> torch.Tensor:
        """Return concatenated tensors, given the number of each rank's rows."""
        most, row = max(rows), tensor.shape[1:]
        if not most or not row.numel():
            return tensor.new_empty((sum(rows), *row))
        padding = (most * self.size - sum(rows)) * row.numel() * tensor.element_size()
        if padding <= _MOST_PADDING_BYTES:
            padded = tensor
            if tensor.shape[0] < most:
                padded = tensor.new_zeros((most, *row))
                padded[: tensor.shape[0]] = tensor
            parts = self._gather_equal(padded, name)()
            return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
        gathered = tensor.new_empty((sum(rows), *row))
        own_parts = gathered.split(list(rows))
        own_parts[self.rank].copy_(tensor)
        waits = [self._broadcast(p, root, name) for root, p in enumerate(own_parts) if p.numel()]
        for wait in waits:
            wait()
        return gathered

    def _waiting(self, work: Any, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Return a function that waits for an operation and holds its tensor until then."""
        number = next(self._numbers)

        def wait() -> None:
            with _naming(name):
                if self._waits_on_gpu(tensor):
                    work.wait()
                else:
                    self._wait(work, number, name)

        return wait

    def _wait(self, work: Any, number: int, name: str) -> None:
        """Wait for an operation of Gloo, and report the ranks that do not take part in it."""
        started = time.monotonic()
        warn_after = self._warn_after
        published = min(_PUBLISH_SECONDS, warn_after / 2, self._end_after / 2)
        if _is_done(work, _MOST_SECONDS if self._store is None else published):
            return
        self._store.set(f"waits/{self.rank}", str(number))
        while True:
            left = min(warn_after, self._end_after) - (time.monotonic() - started)
            if _is_done(work, max(left, published)):
                return
            seconds = time.monotonic() - started
            absent = [rank for rank in range(self.size) if not self._waits(rank, number)]
            if seconds >= self._end_after and absent:
                raise CollectiveError(
                    "\n".join(not_taking_part(rank, name, seconds) for rank in absent)
                )
            if seconds >= warn_after and absent:
                warn_after = math.inf
                logger.warning("%s", " ".join(not_taking_part(r, name, seconds) for r in absent))

    def _waits(self, rank: int, number: int) -> bool:
        key = f"waits/{rank}"
        return self._store.check([key]) and self._store.get(key) == str(number).encode()


class _Reduce(torch.autograd.Function):
    """Reduction whose gradients are reduced alike, as Horovod's."""

    @staticmethod
    def forward(
        context: Any,
        tensor: torch.Tensor,
        collectives: DistributedCollectives,
        op: str,
        name: str | None,
    ) -> torch.Tensor:
        context.collectives, context.op, context.name = collectives, op, name
        return collectives.reduce_async(_copied(tensor), op, name or "reduce")()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        name = f"{context.name or 'reduce'}.gradient"
        reduced = context.collectives.reduce_async(_copied(gradient), context.op, name)()
        return reduced, None, None, None


class _Gather(torch.autograd.Function):
    """Gather whose gradients are averaged over the ranks, as Horovod's."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, collectives: DistributedCollectives, name: str | None
    ) -> torch.Tensor:
        gathered, rows = collectives.gather_parts(tensor, name)
        context.collectives, context.rows, context.name = collectives, rows, name
        return gathered

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        collectives, name = context.collectives, f"{context.name or 'gather'}.gradient"
        averaged = collectives.reduce_async(_copied(gradient), "mean", name)()
        return averaged.split(context.rows)[collectives.rank], None, None


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _is_done(work: Any, seconds: float) -> bool:
    """Wait for an operation, and return whether it has ended in time; raises its error."""
    try:
        work.wait(timedelta(seconds=min(seconds, _MOST_SECONDS)))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raise errors of an operation as `CollectiveError`, with the operation's name."""
    try:
        yield
    except CollectiveError:
        raise
    except (RuntimeError, ConnectionError) as error:
        raise CollectiveError(
            f"{name!r} failed, probably because another rank has ended: {error}"
        ) from error


@contextlib.contextmanager
def connected(
    mp_start_method: str | None, ranks: int | None, use_gpu: bool
) -> Iterator[DistributedCollectives]:
    """Connect this rank to the others for the duration of the block.

    After an error in the block, connections are closed only when the process ends.
    """
    set_start_method(mp_start_method)
    collectives = connect(use_gpu)
    check_ranks(collectives.size, ranks)
    yield collectives
    collectives.close()


def connect(use_gpu: bool = True) -> DistributedCollectives:
    """Connect this rank to the others, until `DistributedCollectives.close` or its end.

    Makes the default process group, unless the user's program has made it.

    Raises
    ------
    ParamError
        If neither this package nor a launcher of ``torch.distributed`` has started this rank. Also
        if the user's group has no library for tensors on the CPU.
    """
    client = RankClient.from_environment()
    rank, size, local_rank, local_size, node_rank = _numbers_of_rank(os.environ)
    store: Any = None if client is None else RendezvousStore(client)
    is_own = not dist.is_initialized()
    if is_own:
        if store is None and size == 1:
            store = dist.HashStore()
        elif store is None and "MASTER_ADDR" in os.environ:
            store, *_ = next(dist.rendezvous("env://", rank, size))
        elif store is None:
            raise ParamError(
                "collectives: 'torch' needs ranks that this package or torchrun has started. Set "
                "collectives='horovod' for ranks that horovodrun starts."
            )
    elif "cpu:" not in dist.get_backend_config():
        raise ParamError(
            f"collectives: this program's default process group is {dist.get_backend()!r}, which "
            "has no operations on CPUs. Make it by init_process_group('cpu:gloo,cuda:nccl')."
        )
    base_store = store
    if store is not None:
        store = dist.PrefixStore(f"hvd_estimators/{next(_sessions)}", store)
    if is_own:
        nccl = use_gpu and dist.is_nccl_available()
        nccl = nccl and _have_own_gpus(store, rank, size, local_rank)
        _make_group("cpu:gloo,cuda:nccl" if nccl else "gloo", store, rank, size)
    collectives = DistributedCollectives(store, local_rank, local_size, node_rank, is_own)
    # Without this reference, C++ code would not find the methods of a Python store.
    collectives.base_store = base_store
    if client is not None:
        client.request(JOINED)
    return collectives


def _have_own_gpus(store: Any, rank: int, size: int, local_rank: int) -> bool:
    """Return whether each rank has a GPU that no other rank has. Called by all ranks."""
    index = gpu_index(torch.cuda.device_count() if torch.cuda.is_available() else 0, local_rank)
    store.set(f"gpu/{rank}", "" if index is None else json.dumps(own_gpu(index)))
    gpus = {bytes(store.get(f"gpu/{other}")) for other in range(size)}
    return len(gpus) == size and b"" not in gpus


def _make_group(backend: str, store: Any, rank: int, size: int) -> None:
    """Make the default group, in at most `timeouts.GLOO_TIMEOUT` or the user's limit.

    Gloo's own limit would also apply to operations. An operation may take as long as the slowest
    rank needs.
    """
    given = os.environ.get(timeouts.GLOO_TIMEOUT_VARIABLE, "")
    seconds = int(given) if given.isdigit() else int(timeouts.GLOO_TIMEOUT)
    connected: concurrent.futures.Future[None] = concurrent.futures.Future()
    _, end_after = hold_up_limits(os.environ)
    # Operations of this package end before that, with the names of the absent ranks.
    limit = min(end_after + _END_LATER_SECONDS, _MOST_SECONDS)

    def connect() -> None:
        try:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit)
            )
        except BaseException as error:
            connected.set_exception(error)
        else:
            connected.set_result(None)

    threading.Thread(target=connect, daemon=True).start()
    with _naming("connection"):
        try:
            connected.result(seconds)
        except concurrent.futures.TimeoutError as error:
            raise CollectiveError(
                f"Rank {rank} of {size} has not connected to all others in {seconds} s "
                f"({timeouts.GLOO_TIMEOUT_VARIABLE})."
            ) from error


def _numbers_of_rank(env: Mapping[str, str]) -> tuple[int, int, int, int, int]:
    """Return rank, size, local rank, local size and machine from the environment."""
    names = (
        ("HOROVOD_RANK", "RANK", 0),
        ("HOROVOD_SIZE", "WORLD_SIZE", 1),
        ("HOROVOD_LOCAL_RANK", "LOCAL_RANK", 0),
        ("HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", 1),
        ("HOROVOD_CROSS_RANK", "GROUP_RANK", 0),
    )
    rank, size, local_rank, local_size, node = (
        int(env.get(horovods, env.get(torchs, default))) for horovods, torchs, default in names
    )
    return rank, size, local_rank, local_size, node
