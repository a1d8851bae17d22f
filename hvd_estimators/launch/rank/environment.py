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


def assign_ranks(hosts: Sequence[str]) -> list[SlotInfo]:
    """Assign a rank to each task, contiguous on each host.

    Local ranks count the tasks of a host, not of an executor or container. Otherwise tasks that see
    all GPUs of the machine could choose the same GPU.

    Parameters
    ----------
    hosts : sequence of str
        The host of each task.

    Returns
    -------
    list of SlotInfo
        The slot of each task, in the order of the tasks. Task 0 has rank 0.
    """
    sizes = Counter(hosts)  # in the order of the hosts' first tasks
    names = list(sizes)
    order = [names.index(host) for host in hosts]
    tasks = sorted(range(len(hosts)), key=lambda task: (order[task], task))
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

# Settings of libraries that ranks use, which mean the same on every machine. Not the variables of a
# job that has started the driver.
_SETTINGS = re.compile(
    "(?!TF_CONFIG|HOROVOD_(?:RANK|SIZE|LOCAL|CROSS|HOSTNAME|CONTROLLER|CPU_OPERATIONS|ELASTIC"
    "|GLOO_(?:IFACE|RENDEZVOUS)|SECRET|SPARK_(?:PYTHONPATH|WORK_DIR)))(?:"
    "HOROVOD_.*|HVD_ESTIMATORS_(?:WARM_START|(?:GRACE|HANG|WARM)_SECONDS|HOROVOD_SPARK|COMPAT)"
    "|(?:NCCL|GLOO|UCX|FI)_.*"
    "|(?:OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|MALLOC|ARROW)_.*"
    "|CUDA_(?:LAUNCH_BLOCKING|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)"
    "|(?:CUBLAS|CUDNN)_.*|NVIDIA_TF32_OVERRIDE"
    "|(?:TF|XLA|KERAS|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|ACCELERATE|TOKENIZERS)_.*"
    "|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE"
    "|PYTHON(?:HASHSEED|WARNINGS|FAULTHANDLER)"
    # Callbacks and Lightning's loggers run on ranks, and need their keys.
    "|(?:WANDB|MLFLOW|COMET)_.*)"
)
_PATHS = re.compile(r"\w*_(?:HOME|DIR|PATH)")

# Variables of a machine: programs, libraries, network, GPUs and access to stores.
_OF_THE_MACHINE = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|HOSTNAME|LANG|LANGUAGE|LC_.*|TZ|TERM|COLUMNS|TMP|TEMP|TMPDIR"
    "|XDG_.*|LD_.*|DYLD_.*|PYTHON(?!_).*|VIRTUAL_ENV|CONDA_PREFIX|HF_HOME"
    "|(?i:https?|all|no)_(?i:proxy)|SSL_CERT_.*|(?:REQUESTS|CURL)_CA_BUNDLE"
    r"|CUDA_.*|NVIDIA_.*|\w*VISIBLE_DEVICES|GPU_DEVICE_ORDINAL"
    "|JAVA_HOME|CLASSPATH|HADOOP_.*|LIBHDFS.*|KRB5.*"
    "|AWS_.*|GOOGLE_.*|CLOUDSDK_.*|AZURE_.*|DATABRICKS_RUNTIME_VERSION"
)


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's variables that ranks receive on every machine.

    They are settings of Horovod, this package, frameworks, trackers, and libraries of collectives
    and threads, without paths. ``docs/launching.rst`` lists them. No other variable leaves the
    driver, because it may be a secret, and Spark writes what it sends to disks and networks.
    """
    return {
        name: value
        for name, value in environment.items()
        if _SETTINGS.fullmatch(name) and not _PATHS.fullmatch(name)
    }


def local_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on the driver's own machine inherit.

    They are the variables of `shared_environment`, also paths, and of the machine. On a cluster,
    ranks inherit the whole environment of their executor.
    """
    return {
        name: value
        for name, value in environment.items()
        if _SETTINGS.fullmatch(name) or _OF_THE_MACHINE.fullmatch(name)
    }


def child_environment(
    base: Mapping[str, str], *overlays: Mapping[str, str | None] | None
) -> dict[str, str]:
    """Merge environments, later ones taking precedence; None deletes a variable."""
    env: dict[str, str | None] = dict(base)
    for overlay in overlays:
        env.update(overlay or {})
    return {name: str(value) for name, value in env.items() if value is not None}
