"""Check a cluster from its executors and suggest fixes, by host.

`check_cluster` and ``hvd-estimators doctor --cluster`` call this module on the driver.
`collect_cluster` finds the facts and does not judge them. `diagnose_cluster` turns facts into rows.

Two rounds of jobs run on the executors. Each round has one job of one task for every task slot, not
one job of all tasks: Spark ends a job if one of its hosts runs another Python, and nothing would be
known about the other hosts. In the first round, hosts report their packages, write to the store
and start a listener. In the second one, they connect to each other and read each other's files.
"""

from __future__ import annotations

import base64
import functools
import json
import pickle
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators._util.spark_session import current_session, using_session
from hvd_estimators.commands import cluster_probe, doctor
from hvd_estimators.commands.doctor import Facts, HorovodFacts, Row, Status
from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, SlotsError, UnreachableError
from hvd_estimators.launch.validation import interface_names, whole_number
from hvd_estimators.launch.versions import installed_versions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.store import Store

DRIVER = "driver"
"""Name of the driver in the report."""

# Packages that every rank needs; frameworks may differ if no host has them.
_REQUIRED = ("hvd_estimators", "pyspark", "pyarrow", "numpy", "cloudpickle")

# Time that tasks keep their slots, so that each slot gets a task. A host on which tasks fail needs
# the first round's time for Spark's four attempts.
_SURVEY_HOLD = 10.0
_VERIFY_HOLD = 4.0

# Limits of the rounds, above those of their probes.
_SURVEY_SECONDS = cluster_probe.INSTALLATION_SECONDS + 90.0
_VERIFY_SECONDS = cluster_probe.REACH_SECONDS + cluster_probe.PROGRAM_SECONDS + 60.0
_SLOTS_SECONDS = 60.0
_STORE_SECONDS = 90.0
_CANCEL_SECONDS = 15.0

_SKEW_SECONDS = 30.0
"""Difference between clocks that is a problem."""

_SAME_ENVIRONMENT = (
    "give all hosts the driver's environment (spark.archives, or an installation at the same path)"
)
_PYTHON_REMEDY = (
    "set PYSPARK_PYTHON or spark.pyspark.python to a Python of the driver's version, or "
    + _SAME_ENVIRONMENT
)
_CLOCK_REMEDY = "synchronize the clock: timedatectl set-ntp true, or start chronyd on this host"
_STORE_REMEDY = (
    "use a prefix on storage that all machines share (HDFS, S3, NFS), and mount it or set its "
    "credentials on this host"
)
_NETWORK_REMEDY = (
    "open all TCP ports between the hosts (firewall, security group or NetworkPolicy), or name the "
    "interface that leads to them: SparkBackend(nics='eth1')"
)
_TASK_REMEDY = "see the executor's log in Spark's web interface"


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
        allocation, and over Spark Connect if the server's settings do not tell the number.
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
    if not (needed or different or host.error):
        yield Row("Packages", f"the driver's {len(facts.versions) - len(unneeded)} versions")


def _install(facts: ClusterFacts, names: Sequence[str]) -> str:
    pins = " ".join(f'"{name}=={facts.versions[name]}"' for name in names if name != "horovod")
    commands = [f"pip install {pins}"] if pins else []
    commands += [INSTALL["horovod"]] if "horovod" in names else []
    return f"{' && '.join(commands)} on this host, or {_SAME_ENVIRONMENT}"


def _store_row(facts: ClusterFacts, name: str, problems: Mapping[str, str] | None) -> Row:
    if problems is None:
        return Row("Store", "not checked, because no second task ran here", Status.WARNING)
    # A host that does not see the driver's file has another folder. Others cannot see its files.
    apart = {
        host.name for host in facts.hosts if host.store and {DRIVER, host.name} & {*host.store}
    }
    found = {other: text for other, text in problems.items() if other not in apart or other == name}
    if not found:
        return Row("Store", f"writes to {facts.store}, and reads what all other hosts wrote")
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
    if len(facts.hosts) == 1:
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
    return Row("Network", f"connects to {', '.join(_others(facts, host))}")


def _others(facts: ClusterFacts, host: HostFacts) -> list[str]:
    return [other.name for other in facts.hosts if other.name != host.name]


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


def collect_cluster(
    spark: SparkSession,
    store: Store | str | None = None,
    *,
    num_proc: int | None = None,
    nics: str | Iterable[str] | None = None,
) -> ClusterFacts:
    """Collect the facts about a session's executors; see `check_cluster` for the arguments."""
    from hvd_estimators.launch.cluster.connect import current_cluster
    from hvd_estimators.store.base import as_store

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
    if opened is None:
        return _collect(cluster, number, request, None, problems)
    folder = f"{opened.folder}/.doctor-{check}"
    document = base64.b64encode(pickle.dumps(opened)).decode()
    request["store"] = {"pickle": document, "folder": folder}
    write = functools.partial(opened.write_text, f"{folder}/{DRIVER}", DRIVER)
    problems[DRIVER] = _problem_of(write)
    try:
        return _collect(cluster, number, request, opened, problems)
    finally:
        _problem_of(functools.partial(opened.delete, folder))


def _number_of_tasks(cluster: Cluster, num_proc: int | None) -> int:
    from hvd_estimators.launch.cluster.application import await_slots
    from hvd_estimators.launch.cluster.capacity import ask_for_executors

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
    import importlib.metadata

    import pyspark

    versions = {name: version for name, version in installed_versions().items() if name != "Python"}
    versions["numpy"] = importlib.metadata.version("numpy")
    return {**versions, "pyspark": pyspark.__version__}


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
    second: list[_Answer] = []
    if answers:
        again = {
            **request,
            "seconds": _VERIFY_HOLD,
            "hosts": list(answers),
            "listeners": listeners,
        }
        num_answers = sum(map(len, answers.values()))
        second = _run(cluster, num_answers, "verify", again, _VERIFY_SECONDS)
    by_file = {cluster_probe.file_of(identity): name for identity, name in names.items()}
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
                listener_error=_listener_error(_first_with(found, "listener")),
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
        driver_store.update(_driver_store(store, request["store"]["folder"], by_file))
    return ClusterFacts(
        python=platform.python_version(),
        versions=_driver_versions(),
        hosts=sorted(hosts, key=lambda host: host.name),
        failed=[FailedTask(a.host, a.error) for a in (*first, *second) if not a.facts],
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
    from hvd_estimators.launch.cluster.jobs import spark_job

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
            host = re.search(r"\(([^\s()]+) executor \S+\)", str(error))
            answers.setdefault(index, _Answer({}, str(error), host[1] if host else ""))

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
            hosts = [task.host for task in cluster.running_tasks(tag)]
            cluster.cancel(tag)
        except Exception:
            hosts = []  # the context has been stopped
    if hosts:
        return _Answer({}, f"the task did not end within {seconds:g} s", hosts[0])
    return _Answer({}, f"no task slot became free within {seconds:g} s; other jobs hold them")


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


def _listener_error(listener: Mapping[str, Any] | None) -> str:
    return "" if listener is None else listener["error"]


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
    from hvd_estimators.launch.task.addresses import HostCandidates, choose

    hosts = {identity: HostCandidates(**given) for identity, given in listeners.items()}
    if len(hosts) < 2:
        return ""
    try:
        choose(hosts, reports)
    except UnreachableError as error:
        return " ".join(str(error).splitlines())
    return ""


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


def _driver_store(store: Store, folder: str, by_file: Mapping[str, str]) -> dict[str, str]:
    def problem(file: str) -> str:
        return _problem_of(functools.partial(_read, store, f"{folder}/{file}"))

    return {name: problem(file) for file, name in by_file.items() if file != DRIVER}


def _read(store: Store, path: str) -> None:
    if not store.exists(path):
        raise HvdEstimatorsError("does not see it")
    store.read(path)


def _problem_of(action: Callable[[], object]) -> str:
    """Return the error of an action of the driver; empty without an error."""
    found = [f"no answer within {_STORE_SECONDS:g} s"]

    def run() -> None:
        try:
            action()
            found.append("")
        except Exception as error:
            found.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
    return found[-1]


def _skew(answers: Sequence[_Answer]) -> tuple[float, float]:
    """Return bounds of the host's clock minus the driver's, from the times of the tasks."""
    low = max(answer.facts["ended"] - answer.received for answer in answers)
    high = min(answer.facts["started"] - answer.sent for answer in answers)
    return low, high
