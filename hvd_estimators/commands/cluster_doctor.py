"""Check a cluster with a launch of ranks on all its task slots, and suggest fixes by host.

`check_cluster` and ``hvd-estimators doctor --cluster`` call this module on the driver. Like
the launch of a training, it checks Python, versions of packages, GPUs and the network. Its ranks
then examine their machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators._util.spark_session import current_session, using_session
from hvd_estimators.commands import doctor
from hvd_estimators.commands.doctor import Facts, Row, Status
from hvd_estimators.exceptions import HvdEstimatorsError
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.launch.task.host_checks import installed_versions
from hvd_estimators.store.base import as_store
from hvd_estimators.store.redaction import redacted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from hvd_estimators.store import Store

DRIVER = "driver"
"""Name of the driver in the report."""

_START_SECONDS = 60.0
"""Time limit for executors and free task slots."""

_SKEW_SECONDS = 30.0
"""Difference between clocks that is a problem."""

_SAME_ENVIRONMENT = "give all hosts the driver's environment (spark.archives)"
_CLOCK_REMEDY = "synchronize the clock: timedatectl set-ntp true, or start chronyd on this host"
_STORE_REMEDY = (
    "use a prefix on storage that all machines share (HDFS, S3, NFS), and mount it or set its "
    "credentials on this host"
)
_GPU_REMEDY = "install NVIDIA's driver, or leave this host out, or set use_gpu=False"


@dataclass(frozen=True)
class HostFacts:
    """Facts about a machine, from its first rank.

    Attributes
    ----------
    name : str
        Host name.
    rank, slots : int
        Number of the first rank, and number of ranks.
    executable : str
        Path of Python.
    versions : mapping of str to str
        Versions of Python and of packages, see `installed_versions`.
    installation : Facts
        Facts of the doctor.
    store : str
        Problem with writing to the store; empty without one.
    started, ended : float
        Times of the machine's clock before and after the examination, in seconds.
    """

    name: str
    rank: int
    slots: int
    executable: str
    versions: Mapping[str, str]
    installation: Facts
    store: str = ""
    started: float = 0.0
    ended: float = 0.0

    def __str__(self) -> str:
        if self.slots == 1:
            return f"{self.name} (rank {self.rank})"
        return f"{self.name} (ranks {self.rank} to {self.rank + self.slots - 1})"


def check_cluster(
    spark: SparkSession | None = None,
    store: Store | str | None = None,
    *,
    num_proc: int | None = None,
    nics: str | Iterable[str] | None = None,
    as_json: bool = False,
) -> bool:
    """Check the executors of a Spark session, and print a table by host.

    Takes about half a minute, and needs free task slots. Runs on the driver.

    Parameters
    ----------
    spark : SparkSession, optional
        The session, classic or of Spark Connect. Default: the current one.
    store : Store or str, optional
        The estimators' store, or its prefix. Each host writes to it, and reads what the driver
        wrote.
    num_proc : int, optional
        Number of task slots to check. Default: all of the application. Required with dynamic
        allocation, and over Spark Connect if the server's settings do not contain the number.
    nics : str or iterable of str, optional
        Network interfaces, as for `SparkBackend`.
    as_json : bool
        Print a list of objects, one per row, instead of tables.

    Returns
    -------
    bool
        False if a row is a problem.

    Raises
    ------
    ParamError
        If an argument is invalid, or ``num_proc`` is needed.
    StoreError
        If the store cannot be opened.
    """
    opened = None if store is None else as_store(store)
    with using_session(spark or current_session()):
        backend = SparkBackend(num_proc, start_timeout=_START_SECONDS, nics=nics)
        backend.num_processes()
        folder = "" if opened is None else f"{opened.folder}/.doctor-{uuid.uuid4().hex}"
        try:
            report = _examined(backend, opened, folder)
        finally:
            if opened is not None:
                with contextlib.suppress(HvdEstimatorsError):
                    opened.delete(folder)
    if as_json:
        rows = [{"host": host, **asdict(row)} for host, rows in report.items() for row in rows]
        print(json.dumps(rows, indent=2))
    else:
        print("\n\n".join(f"{host}\n{doctor.table(rows)}" for host, rows in report.items()))
    return all(row.status is not Status.PROBLEM for rows in report.values() for row in rows)


def _examined(backend: SparkBackend, store: Store | None, folder: str) -> dict[str, list[Row]]:
    """Return the rows of the driver and of each host."""
    versions = installed_versions()
    packages = [f"{name} {version}" for name, version in versions.items() if name != "Python"]
    driver = [Row("Python", sys.version.split()[0]), Row("Packages", ", ".join(packages))]
    report = {DRIVER: driver}
    sent = time.time()
    try:
        hosts = [found for found in backend.run(examine, (store, folder)) if found is not None]
        received = time.time()
        for host in hosts:
            report[str(host)] = list(diagnose_host(host, hosts, versions, (sent, received)))
        driver += _allreduce(backend, hosts)
    except HvdEstimatorsError as error:
        # Launches name the host and the remedy.
        driver.append(Row("Launch", str(error), Status.PROBLEM))
        return report
    if store is not None:
        driver.append(_store_row(backend, store))
    return report


def examine(store: Store | None, folder: str) -> HostFacts | None:
    """Return facts about this machine; None if another rank of the machine does. Runs on a rank.

    Parameters
    ----------
    store : Store or None
        The store to write to.
    folder : str
        A folder of the store, for a file of each machine.
    """
    started = time.time()
    rank, local_rank, slots = (
        int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE")
    )
    if local_rank:
        return None
    problem = ""
    if store is not None:
        try:
            store.write_text(f"{folder}/{rank}", "")
        except Exception as error:
            problem = redacted(f"{type(error).__name__}: {error}", store.secrets)
    return HostFacts(
        name=socket.gethostname(),
        rank=rank,
        slots=slots,
        executable=sys.executable,
        versions=installed_versions(),
        installation=doctor.collect(with_allreduce=False),
        store=problem,
        started=started,
        ended=time.time(),
    )


def diagnose_host(
    host: HostFacts,
    hosts: Sequence[HostFacts],
    versions: Mapping[str, str],
    times: tuple[float, float],
) -> Iterator[Row]:
    """Yield the rows of a host.

    Parameters
    ----------
    host : HostFacts
        The host.
    hosts : sequence of HostFacts
        All hosts.
    versions : mapping of str to str
        Versions on the driver.
    times : tuple of (float, float)
        The driver's times before and after the launch, in seconds.
    """
    yield Row("Python", f"{host.versions['Python']} ({host.executable})")
    missing = [name for name in versions if name not in host.versions]
    needed = [name for name in missing if any(name in other.versions for other in hosts)]
    if missing:
        pins = [f'"{name}=={versions[name]}"' for name in missing if name != "horovod"]
        commands = [f"pip install {' '.join(pins)}"] if pins else []
        commands += [INSTALL["horovod"]] if "horovod" in missing else []
        remedy = f"{' && '.join(commands)} on this host, or {_SAME_ENVIRONMENT}"
        status = Status.PROBLEM if needed else Status.WARNING
        yield Row("Packages", f"{', '.join(needed or missing)} missing", status, remedy)
    else:
        yield Row("Packages", f"{len(versions) - 1} as on the driver")
    yield from doctor.diagnose_training(host.installation)
    with_gpus = [other.name for other in hosts if other.installation.gpus]
    if with_gpus and not host.installation.gpus:
        found = f"none, where {', '.join(with_gpus)} has some"
        yield Row("GPUs", found, Status.PROBLEM, _GPU_REMEDY)
    if host.store:
        yield Row("Store", f"cannot write: {host.store}", Status.PROBLEM, _STORE_REMEDY)
    sent, received = times
    ahead, behind = host.ended - received, sent - host.started  # at least
    if max(ahead, behind) > _SKEW_SECONDS:
        direction = "ahead of" if ahead > behind else "behind"
        found = f"at least {max(ahead, behind):,.0f} s {direction} the driver's"
        yield Row("Clock", found, Status.PROBLEM, _CLOCK_REMEDY)


def _allreduce(backend: SparkBackend, hosts: Sequence[HostFacts]) -> Iterator[Row]:
    """Yield a row about an allreduce of all ranks, with a library that all hosts have."""
    libraries = {"torch.distributed": {"torch"}, "horovod.tensorflow": {"horovod", "tensorflow"}}
    for module, packages in libraries.items():
        if all(packages <= host.versions.keys() for host in hosts):
            started = time.monotonic()
            doctor.check_sums(doctor.reduce_sums(backend, module), module)
            found = f"{backend.num_processes()} processes in {time.monotonic() - started:.1f} s"
            yield Row("Allreduce", f"{found} with {module}")
            return


def _store_row(backend: SparkBackend, store: Store) -> Row:
    try:
        backend.check_store(store)
    except HvdEstimatorsError as error:
        return Row("Store", str(error), Status.PROBLEM, _STORE_REMEDY)
    return Row("Store", f"all hosts read what the driver writes to {store.folder}")
