"""GPU assignment: the single rule for tasks, trainers and strategies.

A task exposes GPUs to its rank through ``CUDA_VISIBLE_DEVICES``. These are the GPUs that Spark has
assigned to the task (`assigned_gpus`). Without an assignment, it is the GPU with the rank's local
number, if the machine has enough GPUs (`rank_gpus`). With NCCL, two ranks of a host must not have
the same GPU (`describe_gpus`).

A rank uses the first GPU that it sees. If it also sees GPUs of other ranks, it uses the one with
its local number (`gpu_index`). Either all ranks have a GPU, or no rank has one (`check_gpus`).
Imports no framework.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence

from hvd_estimators.exceptions import GpuError

Environment = Mapping[str, str | None]

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that lists the GPUs visible to CUDA, in order."""

HIDDEN = {VISIBLE_VARIABLE: "-1"}
"""Environment variables of ranks that see no GPU."""

ADDRESSES_VARIABLE = "HVD_ESTIMATORS_GPU_ADDRESSES"
"""Environment variable with the addresses of the GPUs that Spark assigned to a rank, as JSON."""

LOCAL_RANK_VARIABLE = "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX"

_DEVICES = "/dev"


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark has assigned to this rank. Runs on the rank.

    Addresses have Spark's notation: numbers of the executor's GPUs, or the output of its discovery
    script. The rank sees only these GPUs (``CUDA_VISIBLE_DEVICES``). Frameworks number them 0, 1,
    ….

    Returns
    -------
    list of str
        Empty if Spark assigns no GPUs, and outside of ranks.
    """
    addresses: list[str] = json.loads(os.environ.get(ADDRESSES_VARIABLE) or "[]")
    return addresses


def visible_gpus(env: Environment) -> list[str] | None:
    """Return the names of the GPUs that CUDA would see, for ``CUDA_VISIBLE_DEVICES``.

    Parameters
    ----------
    env : mapping
        The process's environment.

    Returns
    -------
    list of str or None
        None if only a framework can determine them.
    """
    outer = env.get(VISIBLE_VARIABLE)
    if outer is not None:
        return _listed(outer)
    try:
        files = os.listdir(_DEVICES)
    except OSError:
        return None
    devices = [file for file in files if re.fullmatch(r"nvidia\d+", file)]
    usable = [file for file in devices if os.access(f"{_DEVICES}/{file}", os.R_OK | os.W_OK)]
    return [str(index) for index in range(len(usable))] or None


def assigned_gpus(addresses: Sequence[str], env: Environment) -> list[str]:
    """Return the names of the GPUs that Spark assigned to a task. Runs in the task.

    Parameters
    ----------
    addresses : sequence of str
        Spark's addresses of the GPUs. A number is an index into the GPUs that the executor sees:
        with ``CUDA_VISIBLE_DEVICES=3,5``, the GPU at address 1 is 5. UUIDs and names of MIG
        instances are returned unchanged.
    env : mapping
        The executor's environment, updated with the ranks' variables. If
        ``HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX`` has a value other than ``0``, the local rank
        selects the GPU, and Spark's assignment is ignored.

    Raises
    ------
    GpuError
        If an executor does not see a GPU of its addresses.
    """
    if (env.get(LOCAL_RANK_VARIABLE) or "0") != "0":
        return []
    outer = env.get(VISIBLE_VARIABLE)
    if outer is None:
        return list(addresses)
    listed = _listed(outer)
    gpus = []
    for address in addresses:
        if not address.isdigit():
            gpus.append(address)
        elif int(address) < len(listed):
            gpus.append(listed[int(address)])
        else:
            raise GpuError(
                f"Spark assigned the GPU {address} to a task on {socket.gethostname()}, whose "
                f"executor sees {len(listed)} ({VISIBLE_VARIABLE}={outer!r}, in which addresses "
                "count from 0). Let the discovery script (spark.executor.resource.gpu."
                f"discoveryScript) print positions in it or UUIDs, or start executors without "
                f"{VISIBLE_VARIABLE}."
            )
    return gpus


def rank_gpus(
    addresses: Sequence[str],
    gpus: Sequence[str],
    local_rank: int,
    local_size: int,
    env: Environment,
) -> dict[str, str]:
    """Return the variables that restrict a rank to its GPUs. Runs where the rank is started.

    Parameters
    ----------
    addresses : sequence of str
        The GPUs that Spark assigned to the task; empty if Spark does not schedule GPUs.
    gpus : sequence of str
        The result of `assigned_gpus` for these addresses.
    local_rank, local_size : int
        The rank's number on its machine, and the number of ranks there.
    env : mapping
        As for `assigned_gpus`.

    Returns
    -------
    dict
        ``CUDA_VISIBLE_DEVICES`` is absent if there are more ranks than GPUs; ranks then choose by
        `gpu_index`.
    """
    variables = {ADDRESSES_VARIABLE: json.dumps(list(addresses))} if addresses else {}
    if gpus:
        return {**variables, VISIBLE_VARIABLE: ",".join(gpus)}
    visible = visible_gpus(env)
    if visible is None and addresses:
        # Spark schedules GPUs, but the user wants the local rank to choose.
        visible = [str(index) for index in range(local_size)]
    if visible and local_size <= len(visible):
        return {**variables, VISIBLE_VARIABLE: visible[local_rank]}
    return variables


def gpu_index(visible: int, local_rank: int) -> int | None:
    """Return the index of a rank's GPU among those it sees; None without GPUs. Runs in the rank.

    Parameters
    ----------
    visible : int
        Number of GPUs that the rank sees.
    local_rank : int
        The rank's number on its machine.
    """
    if not visible:
        return None
    # Assigned GPUs belong to this rank alone.
    is_own = bool(get_available_devices()) and (os.environ.get(LOCAL_RANK_VARIABLE) or "0") == "0"
    return 0 if is_own else local_rank % visible


def own_gpu(index: int) -> tuple[str, str]:
    """Return the host, and the name of the GPU at an index among those that this rank sees."""
    listed = visible_gpus(os.environ) or []
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    return host, listed[index] if index < len(listed) else str(index)


def check_gpus(available: Sequence[bool]) -> bool:
    """Return whether the ranks have GPUs, given one flag per rank.

    Raises
    ------
    GpuError
        If some ranks have a GPU and others do not.
    """
    if any(available) and not all(available):
        without = [str(rank) for rank, has_gpu in enumerate(available) if not has_gpu]
        raise GpuError(
            f"Ranks {', '.join(without)} see no GPU and the others do. Assign one to every task "
            "(spark.task.resource.gpu.amount, or gpus_per_task), or set use_gpu=False."
        )
    return any(available)


def describe_gpus(gpus: Sequence[tuple[str, str]], kind: str, nccl: bool) -> str:
    """Return a line that lists the ranks' GPUs and the library that reduces between them.

    Parameters
    ----------
    gpus : sequence of (str, str)
        The result of `own_gpu` on each rank.
    kind : str
        The name of rank 0's GPU.
    nccl : bool
        Whether Horovod was built with NCCL.

    Raises
    ------
    GpuError
        If two ranks share a GPU and Horovod uses NCCL, which cannot reduce on a shared GPU.
    """
    shared = [gpu for gpu in dict.fromkeys(gpus) if gpus.count(gpu) > 1]
    if shared and nccl:
        host, gpu = shared[0]
        ranks = [str(rank) for rank, own in enumerate(gpus) if own == (host, gpu)]
        raise GpuError(
            f"Ranks {', '.join(ranks)} on {host} share the GPU {gpu}, which NCCL does not support. "
            "Set num_proc to the number of GPUs, let Spark assign them "
            "(spark.task.resource.gpu.amount=1, or gpus_per_task=1), or set use_gpu=False."
        )
    by_rank = ", ".join(f"rank {rank}: {gpu} of {host}" for rank, (host, gpu) in enumerate(gpus))
    note = " Several ranks share a GPU." if shared else ""
    return f"GPUs ({kind}): {by_rank}. {'NCCL' if nccl else 'Gloo'} reduces between them.{note}"


def _listed(variable: str) -> list[str]:
    """Return the GPUs in the variable as CUDA reads it: up to the first invalid entry."""
    listed: list[str] = []
    for name in (part.strip() for part in variable.split(",")):
        if not re.fullmatch(r"\d+|(?:GPU|MIG)-.+", name):
            break
        listed.append(name)
    return listed
