"""Check a cluster from its executors and suggest fixes, by host.

`check_cluster` and ``hvd-estimators doctor --cluster`` call this module on the driver.
`hvd_estimators.commands.cluster_facts` finds the facts. `diagnose_cluster` turns them into rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hvd_estimators._util.install_hints import INSTALL, SOURCE
from hvd_estimators._util.spark_session import current_session
from hvd_estimators.commands import doctor
from hvd_estimators.commands.cluster_facts import (
    DRIVER,
    ClusterFacts,
    FailedTask,
    HostFacts,
    collect_cluster,
)
from hvd_estimators.commands.doctor import Facts, Row, Status

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from hvd_estimators.store import Store

# Packages that every rank needs; frameworks may differ if no host has them.
_REQUIRED = ("hvd_estimators", "pyspark", "pyarrow", "numpy", "cloudpickle")

_SKEW_SECONDS = 30.0
"""Difference between clocks that is a problem."""

_SAME_ENVIRONMENT = "give all hosts the driver's environment (spark.archives)"
_PYTHON_REMEDY = (
    "set PYSPARK_PYTHON or spark.pyspark.python to a Python of the driver's version, or "
    + _SAME_ENVIRONMENT
)
_CLOCK_REMEDY = "synchronize the clock: timedatectl set-ntp true, or start chronyd on this host"
_STORE_REMEDY = (
    "use a prefix on storage that all machines share (HDFS, S3, NFS), and mount it or set its "
    "credentials on this host"
)
_GPU_REMEDY = "install NVIDIA's driver, or leave this host out, or set use_gpu=False"
_NETWORK_REMEDY = (
    "open all TCP ports between the hosts (firewall, security group or NetworkPolicy), or name the "
    "interface that leads to them: SparkBackend(nics='eth1')"
)
_TASK_REMEDY = "see the executor's log in Spark's web interface"


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
        The estimators' store, or its prefix. Every host writes to it, and reads what others wrote.
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
    SlotsError
        If no executor has registered.
    StoreError
        If the store cannot be opened.
    """
    facts = collect_cluster(spark or current_session(), store, num_proc=num_proc, nics=nics)
    report = diagnose_cluster(facts)
    if as_json:
        rows = [{"host": host, **asdict(row)} for host, rows in report.items() for row in rows]
        print(json.dumps(rows, indent=2))
    else:
        print("\n\n".join(f"{host}\n{doctor.table(rows)}" for host, rows in report.items()))
    return all(row.status is not Status.PROBLEM for rows in report.values() for row in rows)


def diagnose_cluster(facts: ClusterFacts) -> dict[str, list[Row]]:
    """Return the rows of the driver and of each host, each problem with its remedy."""
    report = {DRIVER: list(_driver(facts))}
    for host in facts.hosts:
        slots = f"{host.tasks} task slot{'s' if host.tasks > 1 else ''}"
        place = ", ".join([*host.addresses[:1], slots])
        report[f"{host.name} ({place})"] = list(_host(facts, host))
    for failed in facts.failed:
        title = failed.host or "unknown host"
        row = _failed(facts, failed)
        if row not in report.setdefault(title, []):
            report[title].append(row)
    return report


def _driver(facts: ClusterFacts) -> Iterator[Row]:
    yield Row("Python", facts.python)
    yield Row("Packages", ", ".join(f"{name} {found}" for name, found in facts.versions.items()))
    if facts.store is not None:
        yield _store_row(facts, DRIVER, facts.driver_store)


def _host(facts: ClusterFacts, host: HostFacts) -> Iterator[Row]:
    yield _python(facts, host)
    yield from _packages(facts, host)
    if isinstance(host.installation, Facts):
        yield from doctor.diagnose_training(host.installation)
        yield from _gpus(facts, host.installation)
    elif host.installation is not None:
        found = f"the frameworks could not be checked: {host.installation}"
        yield Row("Training", found, Status.PROBLEM, _TASK_REMEDY)
    if facts.store is not None and host.error is None:
        yield _store_row(facts, host.name, host.store)
    if host.error is None:
        yield _network(facts, host)
    yield _clock(host)


def _python(facts: ClusterFacts, host: HostFacts) -> Row:
    found = f"{host.python} ({host.executable})"
    if _minor(host.python) == _minor(facts.python):
        return Row("Python", found)
    found += f"; the driver has {facts.python}"
    return Row("Python", found, Status.PROBLEM, _PYTHON_REMEDY)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _packages(facts: ClusterFacts, host: HostFacts) -> Iterator[Row]:
    missing = [name for name in facts.versions if name not in host.versions]
    elsewhere = {name for other in facts.hosts for name in other.versions}
    needed = [name for name in missing if name in _REQUIRED or name in elsewhere]
    different = [
        name for name in facts.versions if host.versions.get(name, "") != facts.versions[name]
    ]
    different = [name for name in different if name not in missing]
    if host.error is not None and "hvd_estimators" not in needed:
        found = f"hvd_estimators cannot be imported: {host.error}"
        yield Row("Packages", found, Status.PROBLEM, _install(facts, ["hvd_estimators"]))
    if needed:
        found = f"{', '.join(needed)} missing in {host.executable}"
        if "hvd_estimators" in needed and host.error is not None:
            found += f" ({host.error})"
        yield Row("Packages", found, Status.PROBLEM, _install(facts, needed))
    if different:
        found = ", ".join(
            f"{name} {host.versions[name]} where the driver has {facts.versions[name]}"
            for name in different
        )
        yield Row("Packages", found, Status.PROBLEM, _install(facts, different))
    unneeded = [name for name in missing if name not in needed]
    if unneeded:
        found = f"{', '.join(unneeded)} only on the driver"
        yield Row("Packages", found, Status.WARNING, _install(facts, unneeded))
    if not (missing or different or host.error):
        yield Row("Packages", f"{len(facts.versions)} as on the driver")


def _install(facts: ClusterFacts, names: Sequence[str]) -> str:
    # No package index has this package, nor the Horovod that it builds.
    pins = [f'"{n}=={facts.versions[n]}"' for n in names if n not in ("horovod", "hvd_estimators")]
    pins += [f'"{SOURCE}"'] if "hvd_estimators" in names else []
    commands = [f"pip install {' '.join(pins)}"] if pins else []
    commands += [INSTALL["horovod"]] if "horovod" in names else []
    return f"{' && '.join(commands)} on this host, or {_SAME_ENVIRONMENT}"


def _gpus(facts: ClusterFacts, own: Facts) -> Iterator[Row]:
    """Yield a row if only other hosts have GPUs; ranks then fail, unless they use no GPUs."""
    having = [
        host.name
        for host in facts.hosts
        if isinstance(host.installation, Facts) and host.installation.gpus
    ]
    if having and not own.gpus:
        found = f"none, where {', '.join(having)} has some"
        yield Row("GPUs", found, Status.PROBLEM, _GPU_REMEDY)


def _store_row(facts: ClusterFacts, name: str, problems: Mapping[str, str] | None) -> Row:
    if problems is None:
        return Row("Store", "not checked, because no second task ran here", Status.WARNING)
    # A host that does not see the driver's file has another folder. Others cannot see its files.
    apart = {
        host.name for host in facts.hosts if host.store and {DRIVER, host.name} & {*host.store}
    }
    found = {other: text for other, text in problems.items() if other not in apart or other == name}
    if not found:
        hidden = f", except on {', '.join(problems)}" if problems else ""
        return Row("Store", f"writes to {facts.store}, and reads the files of the others{hidden}")
    lines = [
        f"{'cannot write' if other == name else f'file of {_title(other)}'}: {text}"
        for other, text in found.items()
    ]
    return Row("Store", f"{facts.store}: {'; '.join(lines)}", Status.PROBLEM, _STORE_REMEDY)


def _title(name: str) -> str:
    return "the driver" if name == DRIVER else name


def _network(facts: ClusterFacts, host: HostFacts) -> Row:
    if host.listener_error and len(facts.hosts) > 1:
        return Row("Network", host.listener_error, Status.PROBLEM, _NETWORK_REMEDY)
    if len(facts.hosts) == 1 and not facts.failed:
        return Row("Network", "one host; ranks connect on its loopback interface")
    if host.unreached is None:
        return Row("Network", "not checked, because no second task ran here", Status.WARNING)
    if host.unreached:
        found = "; ".join(
            f"cannot connect to {other} ({', '.join(addresses) or 'it does not listen'})"
            for other, addresses in host.unreached.items()
        )
        return Row("Network", found, Status.PROBLEM, _NETWORK_REMEDY)
    if facts.network_error:
        return Row("Network", facts.network_error, Status.PROBLEM, _NETWORK_REMEDY)
    reached = [other.name for other in facts.hosts if other.addresses and other.name != host.name]
    if not reached:
        return Row("Network", "not checked, because no other host listens", Status.WARNING)
    return Row("Network", f"connects to {', '.join(reached)}")


def _clock(host: HostFacts) -> Row:
    low, high = host.skew
    if low > _SKEW_SECONDS or high < -_SKEW_SECONDS:
        seconds, direction = (low, "ahead of") if low > 0 else (-high, "behind")
        found = f"at least {seconds:,.0f} s {direction} the driver's"
        return Row("Clock", found, Status.PROBLEM, _CLOCK_REMEDY)
    return Row("Clock", f"within {max(abs(low), abs(high)):.1f} s of the driver's")


def _failed(facts: ClusterFacts, failed: FailedTask) -> Row:
    text = failed.message
    other = re.search(r"different version:? \(?(\d+)(?:\.|, )(\d+)", text)
    if other:
        found = f"{other[1]}.{other[2]}; the driver has {facts.python}, and Spark rejects the tasks"
        return Row("Python", found, Status.PROBLEM, _PYTHON_REMEDY)
    missing = re.search(r"No module named '?([\w.]+)", text)
    if missing:
        name = missing[1].partition(".")[0]
        found = f"{name} missing, without which Spark runs no Python task"
        remedy = _install(facts, [name]) if name in facts.versions else _SAME_ENVIRONMENT
        return Row("Packages", found, Status.PROBLEM, remedy)
    program = re.search(r'Cannot run program "([^"]+)"', text)
    if program:
        found = f"{program[1]} does not start"
        return Row("Python", found, Status.PROBLEM, _PYTHON_REMEDY)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Row("Spark task", lines[-1] if lines else "failed", Status.PROBLEM, _TASK_REMEDY)
