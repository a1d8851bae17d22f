"""Facts about the executors of a Spark application, for `hvd_estimators.commands.cluster_doctor`.

Two rounds of jobs run on the executors. Each round has one job of one task for every task slot, not
one job of all tasks: Spark ends a job if one of its hosts runs another Python, and nothing would be
known about the other hosts. In the first round, hosts report their packages, write to the store
and start a listener. In the second one, they connect to each other and read each other's files.
Runs on the driver.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.metadata
import json
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle
import pyspark

from hvd_estimators._util.spark_session import using_session
from hvd_estimators.commands import cluster_probe
from hvd_estimators.commands.doctor import Facts, HorovodFacts
from hvd_estimators.exceptions import ParamError, SlotsError, UnreachableError
from hvd_estimators.launch.cluster.application import await_slots
from hvd_estimators.launch.cluster.capacity import ask_for_executors
from hvd_estimators.launch.cluster.connect import current_cluster
from hvd_estimators.launch.cluster.jobs import spark_job
from hvd_estimators.launch.cluster.spark_errors import failed_on
from hvd_estimators.launch.task.addresses import NICS_HINT, HostAddresses, choose_addresses
from hvd_estimators.launch.task.host_checks import installed_versions
from hvd_estimators.launch.validation import interface_names, whole_number
from hvd_estimators.store.base import as_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.store import Store

DRIVER = "driver"
"""Name of the driver in the report."""

# Time that tasks keep their slots, so that each slot gets a task. A host on which tasks fail needs
# the first round's time for Spark's four attempts.
_SURVEY_HOLD = 10.0
_VERIFY_HOLD = 4.0

# Limits of the rounds, above their probes' limits.
_SURVEY_SECONDS = cluster_probe.INSTALLATION_SECONDS + 90.0
_VERIFY_SECONDS = cluster_probe.REACH_SECONDS + cluster_probe.PROGRAM_SECONDS + 60.0
_SLOTS_SECONDS = 60.0
_STORE_SECONDS = 90.0
_CANCEL_SECONDS = 15.0


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host of executors, seen by one of its tasks.

    Attributes
    ----------
    name : str
        Name of the host; unique in the report.
    python, executable : str
        Version and path of Python.
    versions : mapping of str to str
        Version of each package.
    error : str or None
        Error of importing this package.
    installation : Facts or str or None
        Facts of the doctor on this host, or why there are none.
    addresses : sequence of str
        Addresses that may reach this host.
    listener_error : str
        Why this host does not listen.
    unreached : mapping of str to sequence of str
        Hosts that did not answer, and their addresses; None if it was not tried.
    store : mapping of str to str
        Problem with the files of each host, of this host itself, and of ``driver``; None if it was
        not tried.
    skew : (float, float)
        Bounds of the seconds by which the clock is ahead of the driver's.
    tasks : int
        Number of tasks that reported.
    """

    name: str
    python: str
    executable: str
    versions: Mapping[str, str]
    error: str | None = None
    installation: Facts | str | None = None
    addresses: Sequence[str] = ()
    listener_error: str = ""
    unreached: Mapping[str, Sequence[str]] | None = None
    store: Mapping[str, str] | None = None
    skew: tuple[float, float] = (0.0, 0.0)
    tasks: int = 1


@dataclass(frozen=True)
class FailedTask:
    """A task of the check that failed or did not end; the host is empty if unknown."""

    host: str
    message: str


@dataclass(frozen=True)
class ClusterFacts:
    """Facts about a cluster.

    Attributes
    ----------
    python : str
        Python's version on the driver.
    versions : mapping of str to str
        Versions on the driver.
    hosts : sequence of HostFacts
        The hosts whose tasks reported.
    failed : sequence of FailedTask
        The tasks that did not.
    store : str or None
        Folder of the checked store.
    driver_store : mapping of str to str
        Problems of the driver with the files of each host, and of ``driver``.
    network_error : str
        Why ranks find no addresses although every host reaches all others; empty otherwise.
    """

    python: str
    versions: Mapping[str, str]
    hosts: Sequence[HostFacts] = ()
    failed: Sequence[FailedTask] = ()
    store: str | None = None
    driver_store: Mapping[str, str] = field(default_factory=dict)
    network_error: str = ""


def collect_cluster(
    spark: SparkSession,
    store: Store | str | None = None,
    *,
    num_proc: int | None = None,
    nics: str | Iterable[str] | None = None,
) -> ClusterFacts:
    """Collect the facts about a session's executors; see `check_cluster` for the arguments."""
    opened = None if store is None else as_store(store)
    with using_session(spark):
        cluster = current_cluster()
        number = _number_of_tasks(cluster, num_proc)
    check = uuid.uuid4().hex
    request: dict[str, Any] = {
        "id": check,
        "packages": sorted(_driver_versions().keys() - {"hvd_estimators", "pyspark"}),
        "seconds": _SURVEY_HOLD,
        "driver": cluster.driver_host(),
        "nics": list(interface_names(nics)),
        "store": None,
    }
    problems: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if opened is not None:
            folder = f"{opened.folder}/.doctor-{check}"
            document = base64.b64encode(cloudpickle.dumps(opened)).decode()
            request["store"] = {"pickle": document, "folder": folder}
            stack.callback(_within_limit, functools.partial(opened.delete, folder))
            problems[DRIVER] = _driver_problem(opened, folder, DRIVER, writes=True)
        return _collect(cluster, number, request, opened, problems)


def _number_of_tasks(cluster: Cluster, num_proc: int | None) -> int:
    if num_proc is not None:
        number = whole_number("num_proc", num_proc)
        if cluster.allocates_dynamically:
            ask_for_executors(cluster, number, _SLOTS_SECONDS)
        return number
    if cluster.allocates_dynamically or not cluster.knows_slots:
        raise ParamError(
            "num_proc: the number of task slots is not known with dynamic allocation, or over "
            "Spark Connect without spark.executor.instances and spark.executor.cores. Set num_proc "
            "(--num-proc) to the number of ranks."
        )
    slots = await_slots(cluster, None, 0 if cluster.is_local else _SLOTS_SECONDS)
    if slots < 1:
        raise SlotsError(
            f"No executor has registered with {cluster.master} within {_SLOTS_SECONDS:g} s. Its "
            "web interface and logs say why none starts."
        )
    return slots


def _driver_versions() -> dict[str, str]:
    numpy = importlib.metadata.version("numpy")
    versions = {**installed_versions(), "numpy": numpy, "pyspark": pyspark.__version__}
    del versions["Python"]
    return versions


def _collect(
    cluster: Cluster,
    number: int,
    request: Mapping[str, Any],
    store: Store | None,
    driver_store: dict[str, str],
) -> ClusterFacts:
    first = _run(cluster, number, "survey", request, _SURVEY_SECONDS)
    answers: dict[str, list[_Answer]] = {}
    for answer in first:
        if answer.facts:
            answers.setdefault(answer.facts["identity"], []).append(answer)
    listeners = {
        identity: listener
        for identity, found in answers.items()
        if "endpoints" in (listener := _first_with(found, "listener") or {})
    }
    names = _unique_names({identity: found[0] for identity, found in answers.items()}, listeners)
    writers = {identity for identity, found in answers.items() if _first_with(found, "store")}
    second: list[_Answer] = []
    if answers:
        again = {
            **request,
            "seconds": _VERIFY_HOLD,
            "hosts": [
                identity for identity, found in answers.items() if not found[0].facts["error"]
            ],
            "writers": list(writers),
            "listeners": listeners,
        }
        # As many tasks as before: fewer ones might all go to hosts on which tasks fail.
        second = _run(cluster, number, "verify", again, _VERIFY_SECONDS)
    by_file = {cluster_probe.file_of(identity): names[identity] for identity in writers}
    by_file[DRIVER] = DRIVER
    hosts, reports = [], {}
    for identity, found in answers.items():
        later = [a for a in second if a.facts and a.facts["identity"] == identity]
        reached = _first_with(later, "reached")
        reports[identity] = reached or {}
        hosts.append(
            HostFacts(
                name=names[identity],
                **{name: found[0].facts[name] for name in ("python", "executable", "error")},
                versions=found[0].facts["versions"],
                installation=_installation(_first_with(found, "installation")),
                addresses=[address for address, _ in _endpoints(listeners.get(identity))],
                listener_error=(_first_with(found, "listener") or {}).get("error", ""),
                unreached=None
                if reached is None
                else _unreached(identity, reached, listeners, names),
                store=_store_problems(
                    by_file, _first_with(found, "store"), _first_with(later, "store")
                ),
                skew=_skew([*found, *later]),
                tasks=len(found),
            )
        )
    if store is not None:
        folder = request["store"]["folder"]
        for file, name in by_file.items():
            if file != DRIVER:
                driver_store[name] = _driver_problem(store, folder, file, writes=False)
    failed, failed_later = (
        [FailedTask(a.host, a.error) for a in found if not a.facts] for found in (first, second)
    )
    return ClusterFacts(
        python=platform.python_version(),
        versions=_driver_versions(),
        hosts=sorted(hosts, key=lambda host: host.name),
        failed=failed or failed_later,
        store=None if store is None else store.folder,
        driver_store={name: text for name, text in driver_store.items() if text},
        network_error=_network_error(listeners, reports),
    )


@dataclass(frozen=True)
class _Answer:
    """Facts of a task, and the driver's times before and after it; else its host and error."""

    facts: Mapping[str, Any]
    error: str = ""
    host: str = ""
    sent: float = 0.0
    received: float = 0.0


def _run(
    cluster: Cluster, number: int, probe: str, request: Mapping[str, Any], seconds: float
) -> list[_Answer]:
    """Run a job of one task per slot; return an answer for each, within a time limit."""
    task = functools.partial(cluster_probe.task_of(probe), request=request)
    answers: dict[int, _Answer] = {}
    tags: dict[int, str] = {}

    def run(index: int) -> None:
        try:
            with spark_job(cluster, "Check of the cluster", ranks=True) as tags[index]:
                sent = time.time()
                rows = cluster.collect(1, task, "facts string", barrier=False)
                found = json.loads(rows[0]["facts"])
                answers[index] = _Answer(found, sent=sent, received=time.time())
        except Exception as error:
            # Spark's message has no host if the error is one of Python.
            named = re.search(r"\(([^\s()]+) executor \S+\)", str(error))
            host = (
                named[1] if named else failed_on(cluster, tags[index])[0] if index in tags else ""
            )
            answers.setdefault(index, _Answer({}, str(error), host or ""))

    threads = [cluster.thread(functools.partial(run, index)) for index in range(number)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    for index in range(number):
        if index not in answers:
            answers[index] = _late(cluster, tags.get(index), seconds)
    deadline = time.monotonic() + _CANCEL_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return [answers[index] for index in range(number)]


def _late(cluster: Cluster, tag: str | None, seconds: float) -> _Answer:
    """Cancel a job, and return where its task runs."""
    hosts: list[str] = []
    if tag is not None:
        try:
            hosts = [*cluster.running_tasks(tag).values()]
            cluster.cancel(tag)
        except Exception:
            hosts = []  # the context has been stopped
    if hosts:
        return _Answer({}, f"the task did not end within {seconds:g} s", hosts[0])
    return _Answer({}, f"no task started within {seconds:g} s; other jobs may hold the slots")


def _first_with(answers: Sequence[_Answer], name: str) -> dict[str, Any] | None:
    return next((a.facts[name] for a in answers if a.facts and name in a.facts), None)


def _unique_names(
    first: Mapping[str, _Answer], listeners: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    plain = {identity: a.facts["name"] for identity, a in first.items()}
    return {
        identity: name
        if list(plain.values()).count(name) == 1
        else f"{name}-{next((a for a, _ in _endpoints(listeners.get(identity))), identity)}"
        for identity, name in plain.items()
    }


def _endpoints(listener: Mapping[str, Any] | None) -> list[tuple[str, int]]:
    return [(address, port) for address, port in (listener or {}).get("endpoints", [])]


def _installation(found: Mapping[str, Any] | None) -> Facts | str | None:
    if found is None or "error" in found:
        return None if found is None else str(found["error"])
    try:
        horovod = {name: HorovodFacts(**build) for name, build in found["horovod"].items()}
        return Facts(**{**found, "horovod": horovod})
    except (TypeError, KeyError) as error:  # of another version of this package
        return f"unexpected facts ({error})"


def _unreached(
    identity: str,
    reached: Mapping[str, Any],
    listeners: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
) -> dict[str, list[str]]:
    return {
        names[other]: [address for address, _ in _endpoints(listener)]
        for other, listener in listeners.items()
        if other != identity and not reached.get(other)
    }


def _network_error(
    listeners: Mapping[str, Mapping[str, Any]], reports: Mapping[str, Mapping[str, Sequence[str]]]
) -> str:
    hosts = [HostAddresses(**given["host"]) for given in listeners.values()]
    if len(hosts) < 2:
        return ""
    try:
        names, chosen = choose_addresses(hosts)
    except UnreachableError as error:
        return str(error)
    lines = [
        f"{name} does not reach {other} at {address}, which ranks would use."
        for name, host in zip(names, hosts, strict=True)
        for other, address, there in zip(names, chosen, hosts, strict=True)
        if host is not there and address not in reports[host.identity].get(there.identity, ())
    ]
    return " ".join([*lines, NICS_HINT]) if lines else ""


def _store_problems(
    by_file: Mapping[str, str], *found: Mapping[str, Any] | None
) -> dict[str, str] | None:
    if any(answer is None for answer in found):
        return None
    problems: dict[str, str] = {}
    for answer in found:
        assert answer is not None
        if "error" in answer:
            problems.setdefault(DRIVER, answer["error"])
        for file, text in answer.get("problems", {}).items():
            problems[by_file[file]] = text
    return problems


def _driver_problem(store: Store, folder: str, file: str, *, writes: bool) -> str:
    """Return the driver's problem with a file of the store; empty without a problem."""
    return _within_limit(
        functools.partial(cluster_probe.problem_of_file, store, folder, file, writes=writes)
    )


def _within_limit(action: Callable[[], str | None]) -> str:
    """Return the problem that an action of the driver returns; also one that takes too long."""
    found = [f"no answer within {_STORE_SECONDS:g} s"]

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(action() or "")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
    return found[-1]


def _skew(answers: Sequence[_Answer]) -> tuple[float, float]:
    """Return bounds of the host's clock minus the driver's, from the times of the tasks."""
    low = max(answer.facts["ended"] - answer.received for answer in answers)
    high = min(answer.facts["started"] - answer.sent for answer in answers)
    return low, high
