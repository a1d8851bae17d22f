"""Which GPU a rank sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["visible_gpu"]

LOCAL_RANK_VARIABLE = "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX"


def visible_gpu(
    addresses: Sequence[str], local_rank: int, env: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the variables that pin a rank to one GPU.

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
        ``CUDA_VISIBLE_DEVICES``, or nothing where Spark assigned no GPU: the trainer then picks
        by local rank among what is visible.
    """
    if not addresses:
        return {}
    if (env.get(LOCAL_RANK_VARIABLE) or "0") != "0":
        return {"CUDA_VISIBLE_DEVICES": str(local_rank)}
    return {"CUDA_VISIBLE_DEVICES": addresses[0]}
