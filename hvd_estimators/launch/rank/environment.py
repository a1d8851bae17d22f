"""Environment variables of ranks: those copied from the driver and those added by the launch.

With the ranks' places in their job, and the port that programs for ``torchrun`` need.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvd_estimators._util.system import PLATFORM
from hvd_estimators.launch.rank.output import LOG_LEVEL_VARIABLE
from hvd_estimators.launch.rendezvous.channel import bound_socket
from hvd_estimators.launch.timeouts import GLOO_TIMEOUT, GLOO_TIMEOUT_VARIABLE


@dataclass(frozen=True)
class SlotInfo:
    """Place of a rank in its job.

    Attributes
    ----------
    hostname : str
        The rank's host.
    rank, size : int
        The rank, and the number of ranks.
    local_rank, local_size : int
        The rank's number on its host, and the number of ranks there.
    cross_rank, cross_size : int
        The number of the rank's host among the hosts that have this local rank, and their number.
    host_number, num_hosts : int
        The number of the rank's host among all hosts, and their number.
    """

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host_number: int
    num_hosts: int


@dataclass(frozen=True)
class Master:
    """Meeting point of programs for ``torchrun``, which rank 0 opens when a program asks for it.

    Attributes
    ----------
    address : str
        Numeric address at which all ranks reach rank 0's host.
    port : int
        Port that is reserved on that host.
    run_id : str
        Identifier of the launch, equal on all ranks.
    """

    address: str
    port: int
    run_id: str


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free TCP port that the system gives to no other program until the block ends.

    A socket stays bound to the port on all addresses, and does not listen. On Linux, a process may
    listen on the port meanwhile if it sets ``SO_REUSEADDR``, as torch's ``TCPStore`` does. It may
    also close the port and listen again.

    Other systems do not allow this. There, the socket is closed at once, and the port is only
    unlikely to be taken.
    """
    with bound_socket("", is_shared=True) as reserving:
        port = int(reserving.getsockname()[1])
        if PLATFORM != "linux":
            reserving.close()
        yield port


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
    sizes = Counter(hosts)  # in the order of the hosts' first tasks
    names = list(sizes)
    # Hosts and executors are ordered by their first tasks.
    order = [names.index(host) for host in hosts]
    firsts = [groups.index(group) for group in groups]
    tasks = sorted(range(len(groups)), key=lambda task: (order[task], firsts[task], task))
    num_assigned: Counter[str] = Counter()
    slots: dict[int, SlotInfo] = {}
    for rank, task in enumerate(tasks):
        host = hosts[task]
        local_rank = num_assigned[host]
        num_assigned[host] += 1
        peers = [name for name in names if sizes[name] > local_rank]
        slots[task] = SlotInfo(
            hostname=host,
            rank=rank,
            size=len(tasks),
            local_rank=local_rank,
            local_size=sizes[host],
            cross_rank=peers.index(host),
            cross_size=len(peers),
            host_number=order[task],
            num_hosts=len(names),
        )
    return [slots[task] for task in range(len(tasks))]


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


IDENTITY_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""Variables by which ``torchrun`` makes a process a rank. One value cannot suit several ranks."""


def torchrun_environment(
    slot: SlotInfo, master: Master, has_own_gpus: bool
) -> dict[str, str | None]:
    """Return the variables that ``torchrun`` would set; None deletes an inherited variable.

    torch's ``init_process_group``, Lightning and Accelerate read them.

    Parameters
    ----------
    slot : SlotInfo
        The rank's place in the job.
    master : Master
        The meeting point.
    has_own_gpus : bool
        Whether the rank sees only its own GPUs. Programs take ``LOCAL_RANK`` for the number of
        their GPU, which is then 0. So such a rank counts as a node.
    """
    if has_own_gpus:
        local_rank, local_size, node, num_nodes = 0, 1, slot.rank, slot.size
    else:
        local_rank, local_size = slot.local_rank, slot.local_size
        node, num_nodes = slot.host_number, slot.num_hosts
    return {
        **dict.fromkeys(IDENTITY_VARIABLES),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(slot.rank),
        "ROLE_WORLD_SIZE": str(slot.size),
        "MASTER_ADDR": master.address,
        "MASTER_PORT": str(master.port),
        # With this variable, Lightning uses the variables above, whatever the scheduler.
        "TORCHELASTIC_RUN_ID": master.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


DEFAULTS = {GLOO_TIMEOUT_VARIABLE: GLOO_TIMEOUT, LOG_LEVEL_VARIABLE: "1"}
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
            *IDENTITY_VARIABLES,
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
    - Variables of the driver's machine or process: ``PATH``, ``HOME`` and other paths, variables
      of Python, Spark, Java and Hadoop, visible GPUs, and ranks.

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
