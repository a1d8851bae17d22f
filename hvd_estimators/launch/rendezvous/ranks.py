"""Who is which rank, and what a rank's environment tells it."""

from __future__ import annotations

from collections.abc import Sequence

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments

__all__ = ["assign_ranks", "rank_environment"]


def assign_ranks(hosts: Sequence[str], executors: Sequence[str] | None = None) -> list[SlotInfo]:
    """Give each task a rank, contiguous on each host, and there in each executor.

    Local ranks count the tasks of a host, not of an executor or container: those that see all of
    the machine's GPUs must not choose the same one. Where containers see only their own GPUs, the
    ranks of one still choose different ones, since their local ranks follow each other.

    Parameters
    ----------
    hosts : sequence of str
        The host of each task.
    executors : sequence of str, optional
        The executor of each task. Default: those of a host are of one.

    Returns
    -------
    list of SlotInfo
        Each task's slot, in the order of the tasks. Task 0 has rank 0.
    """
    groups = list(zip(hosts, executors or hosts, strict=True))
    names = list(dict.fromkeys(hosts))
    slots = get_host_assignments(
        [HostInfo(name, hosts.count(name)) for name in names], len(hosts), len(hosts)
    )
    # Hosts and executors are in the order of their first tasks.
    order = [names.index(host) for host, _ in groups]
    firsts = [groups.index(group) for group in groups]
    tasks = sorted(range(len(groups)), key=lambda task: (order[task], firsts[task], task))
    by_rank = sorted(slots, key=lambda slot: slot.rank)
    assigned = dict(zip(tasks, by_rank, strict=True))
    return [assigned[task] for task in range(len(groups))]


def rank_environment(slot: SlotInfo) -> dict[str, str]:
    """Return the environment variables that make a process one rank of a Gloo job.

    Where the ranks meet is told by `hvd_estimators.launch.rendezvous.gloo_proxy.GlooProxy`, and on
    which address they listen by `hvd_estimators.launch.network.addresses.listening_environment`.
    """
    return {
        "HOROVOD_HOSTNAME": str(slot.hostname),
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
