"""Which GPU a rank uses: the one rule for tasks, trainers and strategies.

A task that Spark has assigned a GPU to shows its rank that one alone (`visible_gpu`). Of the GPUs
that a rank sees it takes the one of its number on the machine (`gpu_index`), which is the only one
where it was assigned. Either all ranks have a GPU or none has (`check_gpus`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["check_gpus", "gpu_index", "visible_gpu"]

LOCAL_RANK_VARIABLE = "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX"


def visible_gpu(
    addresses: Sequence[str], local_rank: int, env: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the variables that pin a rank to one GPU. Runs in the task.

    Parameters
    ----------
    addresses : sequence of str
        The GPUs that Spark assigned to the task; empty where Spark does not schedule GPUs.
    local_rank : int
        The rank's number on its machine.
    env : mapping
        The rank's environment. ``HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX`` set to anything but
        ``0`` takes the local rank where Spark assigned a GPU.

    Returns
    -------
    dict
        ``CUDA_VISIBLE_DEVICES``, or nothing where Spark assigned no GPU: the rank then chooses by
        `gpu_index`.
    """
    if not addresses:
        return {}
    if (env.get(LOCAL_RANK_VARIABLE) or "0") != "0":
        return {"CUDA_VISIBLE_DEVICES": str(local_rank)}
    return {"CUDA_VISIBLE_DEVICES": addresses[0]}


def gpu_index(visible: int, local_rank: int) -> int | None:
    """Return which of the GPUs that a rank sees it uses; None if it sees none. Runs in the rank.

    Parameters
    ----------
    visible : int
        How many it sees.
    local_rank : int
        The rank's number on its machine.
    """
    return local_rank % visible if visible else None


def check_gpus(available: Sequence[bool]) -> bool:
    """Return whether the ranks have GPUs, given what each of them, in order, says.

    Raises
    ------
    RuntimeError
        If some ranks have a GPU and others have none.
    """
    if any(available) and not all(available):
        lacking = [str(rank) for rank, has_gpu in enumerate(available) if not has_gpu]
        raise RuntimeError(
            f"Ranks {', '.join(lacking)} see no GPU and the others do. Give every task one "
            "(spark.task.resource.gpu.amount), or set use_gpu=False."
        )
    return any(available)
