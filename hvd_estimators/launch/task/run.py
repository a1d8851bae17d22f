"""Launch of one rank in its Spark barrier task, from the first check to the last report.

Spark's Python workers on the executors import this module. Runs in the task, except for `outcomes`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import BarrierTaskContext

from hvd_estimators.exceptions import DependencyError, GpuError, ResultsError, UnreachableError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank.environment import Master, assign_ranks, reserved_port
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.supervisor import failure_of, start_rank, supervise
from hvd_estimators.launch.rendezvous.channel import LOOPBACK
from hvd_estimators.launch.rendezvous.client import (
    LocalRendezvousClient,
    PeerLostError,
    RemoteRendezvousClient,
    RendezvousClient,
)
from hvd_estimators.launch.rendezvous.gloo_http import INTERFACE_VARIABLE
from hvd_estimators.launch.rendezvous.server import RendezvousServer
from hvd_estimators.launch.service.events import EventSender, RankStage
from hvd_estimators.launch.service.exchange import exchange
from hvd_estimators.launch.stage import Stage
from hvd_estimators.launch.task.addresses import (
    NICS_HINT,
    Host,
    host_identity,
    names_and_addresses,
    this_host,
)
from hvd_estimators.launch.task.host_checks import check_machines, gpu_variables, machine_problem
from hvd_estimators.launch.task.output import TaskOutput
from hvd_estimators.launch.task.settings import TaskSettings, task_environment, warm_start

if TYPE_CHECKING:
    from hvd_estimators.store import Store

OUTCOME_SCHEMA = "outcome binary"
"""Columns of the rows that `run_rank` yields, as a Spark DDL string."""

LESS_RESULTS = (
    "Return less, or write it to storage and return where; the driver collects more with a larger "
    "spark.driver.memory and spark.driver.maxResultSize."
)
"""Advice for results that are too large."""

# An Arrow value has less than 2 GiB.
_MOST_BYTES = 2**30


def hosts_without(
    batches: Iterator[pa.RecordBatch], *, store: Store, path: str
) -> Iterator[pa.RecordBatch]:
    """Yield this machine's name and the reason if it cannot see a file. In a barrier task."""
    for _ in batches:
        pass
    try:
        problem = None if store.exists(path) else "does not see it"
    except Exception as error:  # e.g. a missing package, credentials or network route
        # Tasks that run ranks do not need the store, so import it here.
        from hvd_estimators.store.redaction import redacted

        problem = redacted(f"{type(error).__name__}: {error}", store.secrets)
    if problem is not None:
        yield pa.RecordBatch.from_pydict({"host": [socket.gethostname()], "problem": [problem]})


def outcomes(rows: Iterable[Any], num_ranks: int) -> list[RankOutcome]:
    """Assemble the outcomes from the rows of all tasks. Runs on the driver.

    Raises
    ------
    ResultsError
        If a rank's result is too large, or rows are missing although no rank has failed. If the
        driver's JVM runs out of memory while it collects, Spark returns the rows so far as if they
        were complete.
    """
    outcomes = [RankOutcome(**pickle.loads(row["outcome"])) for row in rows]
    if len(outcomes) < num_ranks and not any(outcome.failed for outcome in outcomes):
        missing = sorted(set(range(num_ranks)) - {outcome.rank for outcome in outcomes})
        raise ResultsError(
            f"All ranks have ended, and what ranks {', '.join(map(str, missing))} returned did not "
            f"reach the driver, whose memory it probably did not fit in. {LESS_RESULTS}"
        )
    for outcome in outcomes:
        # An exception of the user's that has this name has a report.
        if outcome.error_type == ResultsError.__name__ and outcome.report is None:
            raise ResultsError(outcome.error)
    return outcomes


def run_rank(settings: TaskSettings) -> Iterator[pa.RecordBatch]:
    """Run one rank in a child process and yield its outcome. Runs in a barrier task."""
    context = BarrierTaskContext.get()
    task, host = context.partitionId(), socket.gethostname()
    try:
        outcome = _run_rank(context, settings)
    except (DependencyError, GpuError, UnreachableError) as error:
        kind = type(error).__name__
        outcome = RankOutcome(task, host, None, kind, str(error), ended_at=time.time())
    except PeerLostError as error:
        lost = error.failure.rank, error.failure.host
        why = f"Not started because {error}."
        outcome = RankOutcome(task, host, None, "lost", why, "", time.time(), lost)
    document = pickle.dumps(vars(_within_limit(outcome)))
    yield pa.RecordBatch.from_pydict({"outcome": pa.array([document], pa.binary())})


def _run_rank(context: BarrierTaskContext, settings: TaskSettings) -> RankOutcome:
    """Run one rank: facts, exchange, connection to the task of rank 0, process, outcome."""
    task = context.partitionId()
    with contextlib.ExitStack() as stack:
        # Facts
        here = _this_host(context, settings)
        facts: dict[str, Any] = {
            "host": asdict(here),
            "problem": machine_problem(context, settings),
        }
        server = None
        if task == 0:
            listening = [LOOPBACK, here.address] if here.address else [LOOPBACK]
            server = stack.enter_context(RendezvousServer(settings.secret, listening))
            port = stack.enter_context(reserved_port())
            facts["endpoints"] = server.endpoints
            facts["master"] = {"port": port, "run_id": uuid.uuid4().hex}

        # Exchange
        driver = EventSender(settings.service, timeouts.OUTPUT_SEND)
        stack.enter_context(contextlib.closing(driver))
        peers = exchange(context, driver, facts)
        hosts = [Host(**peer["host"]) for peer in peers]
        check_machines(hosts, [peer["problem"] for peer in peers])
        names, addresses = names_and_addresses(hosts)
        # Task 0 has rank 0.
        slots = assign_ranks(names)
        slot, first = slots[task], slots[0]

        # Connection to the task of rank 0
        client: RendezvousClient
        if server is not None:
            client = LocalRendezvousClient(server.store, slot.rank)
            server.store.expect([s.hostname for s in sorted(slots, key=lambda s: s.rank)])
            server.listen(addresses[0])
        else:
            # If the server could not bind a port, connections to port 0 are refused.
            endpoint = (addresses[0], dict(peers[0]["endpoints"]).get(addresses[0], 0))
            client = stack.enter_context(
                RemoteRendezvousClient(endpoint, settings.secret, slot.rank, first.hostname)
            )
        try:
            client.request("alive")
        except PeerLostError as error:
            if addresses[task] == LOOPBACK:
                raise
            raise UnreachableError(
                f"{slot.hostname} ({addresses[task]}) does not reach the task of rank 0 on "
                f"{first.hostname}: {error}. {NICS_HINT}"
            ) from error
        report = functools.partial(RankStage, slot.rank, task, slot.hostname)
        # Hosts' clocks differ, and the rank that fails first is to blame.
        ahead = client.request("alive")[0]["time"] - time.time()
        driver.send(report(Stage.CONNECTED))

        # Process
        with (
            TaskOutput(slot.rank, settings, driver) as output,
            start_rank(
                *(slot, addresses[task], client),
                call=settings.call,
                secret=settings.secret,
                environment=functools.partial(task_environment, settings),
                master=Master(addresses[0], **peers[0]["master"]),
                gpus=gpu_variables(context, settings, slot),
                on_lines=output.handle,
                separate_streams=settings.separate_streams,
                on_called=functools.partial(output.report, report(Stage.FUNCTION)),
                executable=settings.executable,
                warm=warm_start(settings),
            ) as process,
        ):
            (outcome,) = supervise([process], client.failure)

        # Outcome
        if outcome.failed:
            client.notify("failed", host=slot.hostname, why=failure_of(outcome).why)
        client.notify("done")
        if server is not None:
            server.store.wait_for_all()
    return replace(outcome, ended_at=outcome.ended_at + ahead)


def _this_host(context: BarrierTaskContext, settings: TaskSettings) -> Host:
    if settings.one_machine:
        return Host(host_identity(), socket.gethostname(), "")
    preferred = context.getTaskInfos()[context.partitionId()].address
    preferred = preferred.rpartition(":")[0].strip("[]")
    driver = settings.service.rsplit(":", 2)[0]
    variable = {**os.environ, **settings.env}.get(INTERFACE_VARIABLE)
    if settings.nics or not variable:
        return this_host(preferred, driver, settings.nics, "nics")
    return this_host(preferred, driver, [variable], INTERFACE_VARIABLE)


def _within_limit(outcome: RankOutcome) -> RankOutcome:
    """Return an outcome, or an error if its result is too large for a row of Spark."""
    size = len(outcome.result or b"")
    if size <= _MOST_BYTES:
        return outcome
    error = (
        f"Rank {outcome.rank} returned {size / 2**20:,.0f} MiB, and the driver can collect "
        f"{_MOST_BYTES / 2**20:,.0f} MiB of each rank. {LESS_RESULTS}"
    )
    return replace(outcome, result=None, error_type=ResultsError.__name__, error=error)
