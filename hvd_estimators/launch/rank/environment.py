"""Environment variables of ranks: what they take from the driver, and what the launch adds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments

from hvd_estimators.launch.rank.output import LOG_LEVEL
from hvd_estimators.launch.timeouts import GLOO_TIMEOUT

__all__ = [
    "DEFAULTS",
    "assign_ranks",
    "child_environment",
    "python_path",
    "rank_environment",
    "shared_environment",
]


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

    Where the ranks meet is told by `hvd_estimators.launch.rendezvous.gloo_http.GlooProxy`, and on
    which address they listen by `hvd_estimators.launch.rendezvous.hosts.listening_environment`.
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


DEFAULTS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": GLOO_TIMEOUT, **LOG_LEVEL}


"""Variables of ranks that the user, the driver and the executor have not set."""


# Parts of a name; some only at the end of a word, so that TOKENIZERS_PARALLELISM is none of them.
_SECRET = re.compile(
    "SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE|CONNECTION_?STRING"
    "|(?:TOKENS?|KEYS?|KEY_?ID|PASS|PWD)(?:_|$)"
    "|(?:^|_)(?:PAT|SAS|AUTH|COOKIE|DSN|SIGNATURE)(?:_|$)"
)


# A user and a password in a URL, as in those of databases and proxies.
_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


# What describes the driver's machine, process or session, and would be wrong elsewhere.
_OF_THE_DRIVER = re.compile(
    "|".join(
        [
            # the machine and its user
            "PATH|HOME|USER|LOGNAME|USERNAME|SHELL|SHLVL|PWD|OLDPWD|_|HOST|HOSTNAME|MAIL|EDITOR",
            "TMP|TEMP|TMPDIR|TERM.*|COLUMNS|LINES|PS[1-4]|DISPLAY|WAYLAND_.*|XAUTHORITY|XDG_.*",
            "DBUS_.*|SSH_.*|GPG_.*|SUDO_.*|BASH.*|ZSH.*|LS_COLORS|INVOCATION_ID|JOURNAL_STREAM",
            "LD_LIBRARY_PATH|LD_PRELOAD|DYLD_.*|KRB5CCNAME",
            # Python: the import path travels by itself
            "PYTHONPATH|PYTHONHOME|PYTHONEXECUTABLE|PYTHONUSERBASE|PYTHONSTARTUP|PYTHONPLATLIBDIR",
            "VIRTUAL_ENV.*|CONDA.*|_CE_.*|MPLBACKEND|JPY_.*|PYDEVD_.*|PYTEST_.*|COV_.*",
            # Spark, Java, Hadoop and the cluster's manager
            "SPARK_.*|PYSPARK_.*|_PYSPARK_.*|JAVA_.*|JDK_.*|_JAVA_.*|CLASSPATH|SCALA_.*|HADOOP_.*",
            "YARN_.*|HIVE_.*|HDFS_.*|NM_.*|CONTAINER_ID|LOCAL_DIRS|LOCAL_USER_DIRS|LOG_DIRS",
            "APPLICATION_WEB_PROXY_BASE|KUBERNETES_.*|MESOS_.*|SLURM.*|LSB_.*|PBS_.*|FLUX_.*",
            # GPUs are assigned to each rank
            r"\w*VISIBLE_DEVICES|GPU_DEVICE_ORDINAL",
            # what makes a process one of several: the ranks are told by the launcher
            "HOROVOD_(?:RANK|SIZE|LOCAL_.*|CROSS_.*|GLOO_.*|CONTROLLER|CPU_OPERATIONS|HOSTNAME)",
            "HOROVOD_ELASTIC.*|HOROVOD_SPARK_(?:PYTHONPATH|WORK_DIR)|HVD_ESTIMATORS_.*",
            "RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE",
            "MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|OMPI_.*|PMI_.*|PMIX_.*|MPI_.*|TF_CONFIG",
        ]
    )
)


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that ranks on other machines see.

    All but two kinds. Secrets, which are told by their names (``TOKEN``, ``SECRET``, ``PASSWORD``,
    ``CREDENTIAL``, ``…_KEY`` and the like) or by a password in a URL, because Spark writes what it
    sends to tasks to disks and over networks. And what belongs to the driver's machine or process:
    ``PATH``, ``HOME`` and other places, Python's, Spark's, Java's and Hadoop's own, visible GPUs,
    ranks.

    Parameters
    ----------
    environment : mapping
        The driver's environment.
    """
    return {
        name: value
        for name, value in environment.items()
        if not (
            _SECRET.search(name.upper())
            or _SECRET_VALUE.search(value)
            or _OF_THE_DRIVER.fullmatch(name)
        )
    }


def child_environment(
    base: Mapping[str, str], *overlays: Mapping[str, str | None] | None
) -> dict[str, str]:
    """Lay environments over each other; None deletes a variable."""
    env: dict[str, str | None] = dict(base)
    for overlay in overlays:
        env.update(overlay or {})
    return {name: str(value) for name, value in env.items() if value is not None}


def python_path(*paths: Sequence[str]) -> str:
    """Join import paths for ``PYTHONPATH``, each once."""
    merged = dict.fromkeys(path for group in paths for path in group if path)
    return os.pathsep.join(merged)
