"""Check a cluster with a launch of ranks on all its task slots, and suggest fixes by host.

`check_cluster` and ``hvd-estimators doctor --cluster`` call this module on the driver. Like
the launch of a training, it checks Python, versions of packages, GPUs and the network. The first
rank of each machine then runs the doctor's checks of packages, and writes to the store.
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
from hvd_estimators.commands.doctor import Row, Status
from hvd_estimators.exceptions import HvdEstimatorsError
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.launch.task.host_checks import installed_versions
from hvd_estimators.store.base import as_store
from hvd_estimators.store.redaction import redacted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from hvd_estimators.store import Store

_START_SECONDS = 60.0
"""Time limit for executors and free task slots."""

_SAME_ENVIRONMENT = "give all hosts the driver's environment (spark.archives)"
_STORE_REMEDY = (
    "use a prefix on storage that all machines share (HDFS, S3, NFS), and mount it or set its "
    "credentials on this host"
)


@dataclass(frozen=True)
class HostFacts:
    """Findings on a machine, from its first rank.

    Attributes
    ----------
    name : str
        The host, and the numbers of its ranks.
    versions : mapping of str to str
        Versions of Python and of packages, see `installed_versions`.
    rows : sequence of Row
        Rows of the doctor, and one about a store that cannot be written to.
    """

    name: str
    versions: Mapping[str, str]
    rows: Sequence[Row]


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
        allocation and over Spark Connect.
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
        report: dict[str, list[Row]] = {"driver": []}
        try:
            report["driver"].extend(_examined(backend, opened, folder, report))
        except HvdEstimatorsError as error:
            # Launches name the host and the remedy.
            report["driver"].append(Row("Launch", str(error), Status.PROBLEM))
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


def _examined(
    backend: SparkBackend, store: Store | None, folder: str, report: dict[str, list[Row]]
) -> Iterator[Row]:
    """Yield the rows of the driver, and add the rows of each host to a report."""
    versions = installed_versions()
    packages = [f"{name} {version}" for name, version in versions.items() if name != "Python"]
    yield Row("Python", sys.version.split()[0])
    yield Row("Packages", ", ".join(packages))
    hosts = [found for found in backend.run(examine, (store, folder)) if found is not None]
    for host in hosts:
        report[host.name] = [packages_of(host, hosts, versions), *host.rows]
    yield from _allreduce(backend, hosts)
    if store is not None:
        try:
            backend.check_store(store)
        except HvdEstimatorsError as error:
            yield Row("Store", str(error), Status.PROBLEM, _STORE_REMEDY)
        else:
            yield Row("Store", f"all hosts read what the driver writes to {store.folder}")


def examine(store: Store | None, folder: str) -> HostFacts | None:
    """Return findings on this machine; None if another rank of the machine does. Runs on a rank.

    Parameters
    ----------
    store : Store or None
        The store to write to.
    folder : str
        A folder of the store, for a file of each machine.
    """
    rank, local_rank, slots = (
        int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE")
    )
    if local_rank:
        return None
    rows = [Row("Python", f"{sys.version.split()[0]} ({sys.executable})")]
    # Executors may have PySpark from Spark's own folder.
    found = (row for row in doctor.diagnose() if row.component != "PySpark")
    rows += [row for row in found if row.status is not Status.ABSENT]
    if store is not None:
        try:
            store.write_text(f"{folder}/{rank}", "")
        except Exception as error:
            problem = redacted(f"{type(error).__name__}: {error}", store.secrets)
            rows.append(Row("Store", f"cannot write: {problem}", Status.PROBLEM, _STORE_REMEDY))
    ranks = f"rank {rank}" if slots == 1 else f"ranks {rank} to {rank + slots - 1}"
    return HostFacts(f"{socket.gethostname()} ({ranks})", installed_versions(), rows)


def packages_of(host: HostFacts, hosts: Sequence[HostFacts], versions: Mapping[str, str]) -> Row:
    """Return a row about the driver's packages that a host lacks.

    Parameters
    ----------
    host : HostFacts
        The host.
    hosts : sequence of HostFacts
        All hosts. A package that one of them has is needed.
    versions : mapping of str to str
        Versions on the driver.
    """
    missing = [name for name in versions if name not in host.versions]
    if not missing:
        return Row("Packages", f"{len(versions) - 1} as on the driver")
    needed = [name for name in missing if any(name in other.versions for other in hosts)]
    pins = [f'"{name}=={versions[name]}"' for name in missing if name != "horovod"]
    commands = [f"pip install {' '.join(pins)}"] if pins else []
    commands += [INSTALL["horovod"]] if "horovod" in missing else []
    remedy = f"{' && '.join(commands)} on this host, or {_SAME_ENVIRONMENT}"
    status = Status.PROBLEM if needed else Status.WARNING
    return Row("Packages", f"{', '.join(needed or missing)} missing", status, remedy)


def _allreduce(backend: SparkBackend, hosts: Sequence[HostFacts]) -> Iterator[Row]:
    """Yield a row about an allreduce of all ranks, with a library that all hosts have."""
    libraries = {"torch.distributed": {"torch"}, "horovod.tensorflow": {"horovod", "tensorflow"}}
    for module, packages in libraries.items():
        if all(packages <= host.versions.keys() for host in hosts):
            started = time.monotonic()
            doctor.reduce_sums(backend, module)
            found = f"{backend.num_processes()} processes in {time.monotonic() - started:.1f} s"
            yield Row("Allreduce", f"{found} with {module}")
            return
