"""Environment variables of ranks: those copied from the driver and those added by the launch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments

from hvd_estimators.launch.rank.output import LOG_LEVEL_VARIABLE
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
    """Assign a rank to each task, contiguous on each host and within each executor.

    Local ranks count the tasks of a host, not of an executor or container. Otherwise tasks that see
    all GPUs of the machine could choose the same GPU. If containers see only their own GPUs, the
    ranks of a container still choose different GPUs, because their local ranks are consecutive.

    Parameters
    ----------
    hosts : sequence of str
        The host of each task.
    executors : sequence of str, optional
        The executor of each task. Default: one executor per host.

    Returns
    -------
    list of SlotInfo
        The slot of each task, in the order of the tasks. Task 0 has rank 0.
    """
    groups = list(zip(hosts, executors or hosts, strict=True))
    names = list(dict.fromkeys(hosts))
    slots = get_host_assignments(
        [HostInfo(name, hosts.count(name)) for name in names], len(hosts), len(hosts)
    )
    # Hosts and executors are ordered by their first tasks.
    order = [names.index(host) for host, _ in groups]
    firsts = [groups.index(group) for group in groups]
    tasks = sorted(range(len(groups)), key=lambda task: (order[task], firsts[task], task))
    by_rank = sorted(slots, key=lambda slot: slot.rank)
    assigned = dict(zip(tasks, by_rank, strict=True))
    return [assigned[task] for task in range(len(groups))]


def rank_environment(slot: SlotInfo) -> dict[str, str]:
    """Return the environment variables that make a process one rank of a Gloo job.

    `hvd_estimators.launch.rendezvous.gloo_http` adds the rendezvous and the address to listen on.
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


DEFAULTS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": GLOO_TIMEOUT, LOG_LEVEL_VARIABLE: "1"}
"""Default variables of ranks, used if neither user, driver nor executor has set them.

TensorFlow then logs only errors and warnings, such as of unusable GPUs.
"""

# Parts of names of secrets. Some match only at the end of a word, so that TOKENIZERS_PARALLELISM
# does not match.
_SECRET = re.compile(
    "SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE|CONNECTION_?STRING"
    "|(?:TOKENS?|KEYS?|KEY_?ID|PASS|PWD)(?:_|$)"
    "|(?:^|_)(?:PAT|SAS|AUTH|COOKIE|DSN|SIGNATURE)(?:_|$)"
)

# A user and a password in a URL, for example of a database or proxy.
_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")

# Variables of the driver's machine, process or session, which would be wrong on other machines.
_OF_THE_DRIVER = re.compile(
    "|".join(
        [
            # the machine and its user
            "PATH|HOME|USER|LOGNAME|USERNAME|SHELL|SHLVL|PWD|OLDPWD|_|HOST|HOSTNAME|MAIL|EDITOR",
            "TMP|TEMP|TMPDIR|TERM.*|COLUMNS|LINES|PS[1-4]|DISPLAY|WAYLAND_.*|XAUTHORITY|XDG_.*",
            "DBUS_.*|SSH_.*|GPG_.*|SUDO_.*|BASH.*|ZSH.*|LS_COLORS|INVOCATION_ID|JOURNAL_STREAM",
            "LD_LIBRARY_PATH|LD_PRELOAD|DYLD_.*|KRB5CCNAME",
            # Python: the import path is sent separately
            "PYTHONPATH|PYTHONHOME|PYTHONEXECUTABLE|PYTHONUSERBASE|PYTHONSTARTUP|PYTHONPLATLIBDIR",
            "VIRTUAL_ENV.*|CONDA.*|_CE_.*|MPLBACKEND|JPY_.*|PYDEVD_.*|PYTEST_.*|COV_.*",
            # Spark, Java, Hadoop and the cluster's manager
            "SPARK_.*|PYSPARK_.*|_PYSPARK_.*|JAVA_.*|JDK_.*|_JAVA_.*|CLASSPATH|SCALA_.*|HADOOP_.*",
            "YARN_.*|HIVE_.*|HDFS_.*|NM_.*|CONTAINER_ID|LOCAL_DIRS|LOCAL_USER_DIRS|LOG_DIRS",
            "APPLICATION_WEB_PROXY_BASE|KUBERNETES_.*|MESOS_.*|SLURM.*|LSB_.*|PBS_.*|FLUX_.*",
            # GPUs are assigned to each rank
            r"\w*VISIBLE_DEVICES|GPU_DEVICE_ORDINAL",
            # variables that make a process a member of a job: the launcher sets them for each rank
            "HOROVOD_(?:RANK|SIZE|LOCAL_.*|CROSS_.*|GLOO_.*|CONTROLLER|CPU_OPERATIONS|HOSTNAME)",
            "HOROVOD_ELASTIC.*|HOROVOD_SPARK_(?:PYTHONPATH|WORK_DIR)|HVD_ESTIMATORS_.*",
            "RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE",
            "MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|OMPI_.*|PMI_.*|PMIX_.*|MPI_.*|TF_CONFIG",
        ]
    )
)


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's variables that ranks on other machines receive.

    Two kinds are excluded:

    - Secrets, because Spark writes the data that it sends to tasks to disks and over networks. They
      are recognised by their names (``TOKEN``, ``SECRET``, ``PASSWORD``, ``CREDENTIAL``, ``…_KEY``
      and similar) or by a password in a URL.
    - Variables of the driver's machine or process: ``PATH``, ``HOME`` and other paths, those of
      Python, Spark, Java and Hadoop, visible GPUs, and ranks.

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
    """Merge environments, later ones taking precedence; None deletes a variable."""
    env: dict[str, str | None] = dict(base)
    for overlay in overlays:
        env.update(overlay or {})
    return {name: str(value) for name, value in env.items() if value is not None}


def python_path(*paths: Sequence[str]) -> str:
    """Join import paths for ``PYTHONPATH``, without duplicates."""
    merged = dict.fromkeys(path for group in paths for path in group if path)
    return os.pathsep.join(merged)
