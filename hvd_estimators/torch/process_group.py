"""The process group of a rank: Gloo and NCCL over the job's rendezvous, or Horovod.

The group is the default group of ``torch.distributed``, so that users' code may use it, too. If the
user's program has made a default group, operations go over it, or over Horovod beside it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from hvd_estimators.exceptions import CollectiveError, ParamError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.gpus import gpu_index, own_gpu
from hvd_estimators.launch.rank.hang_detection import hold_up_limit
from hvd_estimators.launch.rendezvous.client import RankClient
from hvd_estimators.torch.operations import Collectives, Places, naming_lost_ranks
from hvd_estimators.torch.rendezvous_store import RendezvousStore
from hvd_estimators.training.collectives_choice import require_horovod
from hvd_estimators.training.horovod_session import check_ranks, horovod_session, set_start_method

# The module does not declare its names for type checkers.
dist: Any = torch.distributed

# Ranks that start apart connect within this time.
_LEAST_SECONDS = 30.0
# Gloo and NCCL need a limit, and a rank may read, validate or save for long.
_MOST_SECONDS = 365 * 86400.0

# Each group of this process has its own keys. All ranks count alike.
_numbers = itertools.count()

# Groups of failed sessions and of `connect_until_replaced`. They are never deleted, because the
# destructor of a group waits for its operations, which may never end.
_replaceable: list[Any] = []
# The newest closed group. A user's DistributedDataParallel also refers to it. If that object's
# destructor ended the group, it would hold the interpreter's lock, for which threads of the group
# may wait before they end.
_closed: list[Any] = []


@contextlib.contextmanager
def connected(
    kind: str, mp_start_method: str | None, ranks: int | None, use_gpu: bool
) -> Iterator[Collectives]:
    """Connect this rank to the others for the duration of the block.

    After an error in the block, connections are closed only when the process or Horovod ends. See
    `hvd_estimators.torch.collectives.session` for the parameters.
    """
    is_own = not dist.is_initialized()
    with contextlib.ExitStack() as stack:
        if kind == "horovod":
            require_horovod("torch")
            import horovod.torch

            stack.enter_context(horovod_session(horovod.torch, mp_start_method, ranks))
        else:
            set_start_method(mp_start_method)
        try:
            collectives = _connect(kind, use_gpu)
            check_ranks(collectives.size, ranks)
            yield collectives
            # A rank that ended earlier would look lost to ranks that still receive.
            collectives.barrier()
        except BaseException:
            if is_own and dist.is_initialized():
                if dist.get_world_size() == 1:  # Nothing waits for other ranks.
                    dist.destroy_process_group()
                else:
                    _replaceable.append(dist.group.WORLD)
            raise
        if is_own and dist.is_initialized():
            _closed[:] = [dist.group.WORLD]
            dist.destroy_process_group()


def connect_until_replaced(kind: str) -> Collectives:
    """Connect this rank to the others until this process ends or makes a further connection."""
    is_own = not dist.is_initialized()
    if kind == "horovod":
        import horovod.torch

        horovod.torch.init()
    collectives = _connect(kind)
    if is_own:
        _replaceable.append(dist.group.WORLD)
    return collectives


def leave_replaceable_group() -> bool:
    """Leave the default group if the next session replaces it, and return whether it does."""
    is_replaceable = dist.is_initialized() and dist.group.WORLD in _replaceable
    if is_replaceable:
        dist.destroy_process_group()
    return is_replaceable


def _connect(kind: str, use_gpu: bool = True) -> Collectives:
    """Make the default process group, unless the user's program has made it.

    Raises
    ------
    ParamError
        If neither this package nor a launcher of ``torch.distributed`` has started this rank. Also
        if the user's group has no library for tensors on the CPU.
    """
    is_own = not dist.is_initialized()
    client = RankClient.from_environment()
    is_horovod = kind == "horovod"
    places = _places_of_horovod() if is_horovod else _places_from(os.environ)
    if not (is_own or is_horovod or "cpu:" in dist.get_backend_config()):
        raise ParamError(
            f"collectives: this program's default process group is {dist.get_backend()!r}, which "
            "has no operations on CPUs. Make it by init_process_group('cpu:gloo,cuda:nccl')."
        )
    base_store, store = None, None
    if is_own:
        base_store = _base_store(is_horovod, client, places)
        store = dist.PrefixStore(f"hvd_estimators/{kind}/{next(_numbers)}", base_store)
    if is_horovod:
        # Registers the backend, whose groups of Gloo beside it meet at the store.
        from hvd_estimators.torch.horovod_group import HorovodGroup

        if is_own:
            rank, size = places.rank, places.size
            dist.init_process_group("horovod", store=store, rank=rank, world_size=size)
        group = dist.group.WORLD if is_own else HorovodGroup(places.rank, places.size)
        uses_nccl = bool(group.uses_nccl)
        collectives = Collectives(group, places, "Horovod", uses_nccl)
    else:
        if is_own:
            _make_group(store, places, use_gpu)
        places = Places(dist.get_rank(), dist.get_world_size(), *places[2:])
        uses_nccl = "nccl" in dist.get_backend()
        group = dist.group.WORLD
        collectives = Collectives(group, places, "torch.distributed", uses_nccl)
    # Without this reference, C++ code would not find the methods of a Python store.
    collectives.base_store = base_store
    return collectives


def _base_store(is_horovod: bool, client: RankClient | None, places: Places) -> Any:
    """Return the store at which the ranks meet."""
    if client is not None:
        return RendezvousStore(client)
    if places.size == 1:
        return dist.HashStore()
    if is_horovod:
        return _tcp_store()
    if "MASTER_ADDR" in os.environ:
        store, *_ = next(dist.rendezvous("env://", places.rank, places.size))
        return store
    raise ParamError(
        "collectives: 'torch' needs ranks that this package or torchrun has started. Set "
        "collectives='horovod' for ranks that horovodrun starts."
    )


def _tcp_store() -> Any:
    """Return a store in rank 0, for ranks that another program has started, such as horovodrun."""
    import horovod.torch as hvd

    if hvd.rank() == 0:
        host = socket.gethostname()
        store = dist.TCPStore(host, 0, hvd.size(), is_master=True, wait_for_workers=False)
        hvd.broadcast_object((host, store.port), name="hvd_estimators.store")
        return store
    host, port = hvd.broadcast_object(None, name="hvd_estimators.store")
    return dist.TCPStore(host, port, hvd.size(), is_master=False, wait_for_workers=False)


def _have_own_gpus(store: Any, places: Places) -> bool:
    """Return whether each rank has a GPU that no other rank has. Called by all ranks."""
    rank, size, local_rank, *_ = places
    index = gpu_index(torch.cuda.device_count() if torch.cuda.is_available() else 0, local_rank)
    store.set(f"gpu/{rank}", "" if index is None else json.dumps(own_gpu(index)))
    gpus = {bytes(store.get(f"gpu/{other}")) for other in range(size)}
    return len(gpus) == size and b"" not in gpus


def _make_group(store: Any, places: Places, use_gpu: bool) -> None:
    """Make the default group, in at most `timeouts.GLOO_TIMEOUT` or the user's limit.

    Gloo's own limit would also apply to operations. An operation may take as long as the slowest
    rank needs.
    """
    rank, size = places.rank, places.size
    given = os.environ.get(timeouts.GLOO_TIMEOUT_VARIABLE, "")
    seconds = int(given) if given.isdigit() else int(timeouts.GLOO_TIMEOUT)
    connected: concurrent.futures.Future[None] = concurrent.futures.Future()
    limit = min(max(hold_up_limit(os.environ), _LEAST_SECONDS), _MOST_SECONDS)

    def connect() -> None:
        try:
            # This waits for the other ranks, too.
            nccl = use_gpu and dist.is_nccl_available() and _have_own_gpus(store, places)
            backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit)
            )
        except BaseException as error:
            connected.set_exception(error)
        else:
            connected.set_result(None)

    threading.Thread(target=connect, daemon=True).start()
    with naming_lost_ranks("connection"):
        try:
            connected.result(seconds)
        except concurrent.futures.TimeoutError as error:
            raise CollectiveError(
                f"Rank {rank} of {size} has not connected to all others in {seconds} s "
                f"({timeouts.GLOO_TIMEOUT_VARIABLE})."
            ) from error


def _places_of_horovod() -> Places:
    import horovod.torch as hvd

    return Places(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())


def _places_from(env: Mapping[str, str]) -> Places:
    """Return the rank's numbers from the environment."""
    names = (
        ("HOROVOD_RANK", "RANK", 0),
        ("HOROVOD_SIZE", "WORLD_SIZE", 1),
        ("HOROVOD_LOCAL_RANK", "LOCAL_RANK", 0),
        ("HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", 1),
        ("HOROVOD_CROSS_RANK", "GROUP_RANK", 0),
    )
    return Places(
        *(int(env.get(horovods, env.get(torchs, default))) for horovods, torchs, default in names)
    )
