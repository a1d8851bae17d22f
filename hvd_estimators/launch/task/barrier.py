"""What runs in each Spark barrier task: one rank, watched and reported on.

Imported by Spark's Python workers on the executors.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from horovod.runner.common.util.hosts import SlotInfo
from pyspark import BarrierTaskContext

from hvd_estimators.exceptions import DependencyError, GpuError, ResultsError, UnreachableError
from hvd_estimators.launch.events.timeline import make_room_for_timeline, with_timeline
from hvd_estimators.launch.network.addresses import (
    INTERFACE_VARIABLE,
    LOOPBACK,
    listening_environment,
)
from hvd_estimators.launch.network.channel import ranks_key
from hvd_estimators.launch.network.reachability import Offer, ProbeListener, agree
from hvd_estimators.launch.rank.outcome import ABORTED, NOT_STARTED, RankOutcome
from hvd_estimators.launch.rank.process import RankProcess
from hvd_estimators.launch.rank.supervisor import failure_of, supervise
from hvd_estimators.launch.rendezvous.client import Link, LocalLink, RemoteLink
from hvd_estimators.launch.rendezvous.gloo_proxy import GlooProxy
from hvd_estimators.launch.rendezvous.ranks import assign_ranks, rank_environment
from hvd_estimators.launch.rendezvous.server import RendezvousServer
from hvd_estimators.launch.task.environment import task_environment, warm_start
from hvd_estimators.launch.task.exchange import Exchange
from hvd_estimators.launch.task.job import Job
from hvd_estimators.launch.task.machines import check_machines, gpu_variables, machine_facts
from hvd_estimators.launch.task.output import TaskOutput

if TYPE_CHECKING:
    from hvd_estimators.store import Store

__all__ = ["LESS_RESULTS", "OUTCOME_SCHEMA", "hosts_without", "outcomes", "run_rank"]

OUTCOME_SCHEMA = "rank int, host string, chunk int, chunks int, bytes binary"
"""Columns of what `run_rank` yields, as a Spark DDL string."""

LESS_RESULTS = (
    "Return less, or write it to storage and return where; the driver collects more with a larger "
    "spark.driver.memory and spark.driver.maxResultSize."
)
"""What to do about results that are too large."""

# One outcome travels as several rows, so that no Arrow value comes near 2 GiB.
_CHUNK_BYTES = 64 * 2**20


def hosts_without(
    batches: Iterator[pa.RecordBatch], *, store: Store, path: str
) -> Iterator[pa.RecordBatch]:
    """Yield this machine's name, and why, if it does not see a file. Runs in a barrier task."""
    for _ in batches:
        pass
    try:
        problem = None if store.exists(path) else "does not see it"
    except Exception as error:  # a package may be missing here, credentials, a route
        # Tasks that run ranks need no store.
        from hvd_estimators.store.errors import redacted

        problem = redacted(f"{type(error).__name__}: {error}", store.secrets)
    if problem is not None:
        yield pa.RecordBatch.from_pydict({"host": [socket.gethostname()], "problem": [problem]})


def outcomes(rows: Iterable[Any], num_ranks: int) -> list[RankOutcome]:
    """Put together what all tasks yielded. Runs on the driver.

    Raises
    ------
    ResultsError
        If not all of it has come, though no rank has failed: where the driver's JVM runs out of
        memory while it collects, Spark returns the rows so far as if they were all.
    """
    chunks: dict[int, dict[int, bytes]] = {}
    wanted: dict[int, int] = {}
    for row in rows:
        chunks.setdefault(row["rank"], {})[row["chunk"]] = bytes(row["bytes"])
        wanted[row["rank"]] = row["chunks"]
    found = [
        RankOutcome(**pickle.loads(b"".join(parts[chunk] for chunk in sorted(parts))))
        for rank, parts in chunks.items()
        if len(parts) == wanted[rank]
    ]
    if len(found) < num_ranks and not any(outcome.failed for outcome in found):
        missing = sorted(set(range(num_ranks)) - {outcome.rank for outcome in found})
        raise ResultsError(
            f"All ranks have ended, and what ranks {', '.join(map(str, missing))} returned did not "
            f"reach the driver, whose memory it probably did not fit in. {LESS_RESULTS}"
        )
    for outcome in found:
        if outcome.error_type == ResultsError.__name__:
            raise ResultsError(outcome.error)
    return found


def run_rank(job: Job) -> Iterator[pa.RecordBatch]:
    """Run one rank in a child process and yield its outcome. Runs in a barrier task."""
    outcome = _run_rank(BarrierTaskContext.get(), job)
    document = pickle.dumps(vars(_within(outcome, job.max_bytes)))
    starts = range(0, len(document), _CHUNK_BYTES)
    for chunk, start in enumerate(starts):
        yield pa.RecordBatch.from_pydict(
            {
                "rank": pa.array([outcome.rank], pa.int32()),
                "host": [outcome.host],
                "chunk": pa.array([chunk], pa.int32()),
                "chunks": pa.array([len(starts)], pa.int32()),
                "bytes": pa.array([document[start : start + _CHUNK_BYTES]], pa.binary()),
            }
        )


def _run_rank(context: BarrierTaskContext, job: Job) -> RankOutcome:
    task = context.partitionId()
    with contextlib.ExitStack() as stack:
        with _probe_listener(context, job) as probes:
            offer = probes.offer()
            server = None
            if task == 0:
                addresses = [LOOPBACK, *offer.addresses()]
                server = stack.enter_context(RendezvousServer(job.secret, addresses))
            # One exchange tells everything on one host.
            mine = {
                "offer": asdict(offer),
                "endpoints": server.endpoints if server else [],
                **machine_facts(context, job, offer.executor),
            }
            exchange = Exchange(context, job)
            peers = exchange(mine)
            offers = [Offer(**peer["offer"]) for peer in peers]
            try:
                problem = check_machines(task, offers, peers)
                if problem is not None:
                    return _not_run(task, offer.name, NOT_STARTED if problem else ABORTED, problem)
                places = agree(offers, task, exchange)
            except (DependencyError, GpuError, UnreachableError) as error:
                return _not_run(task, offer.name, type(error).__name__, str(error))
        slots = assign_ranks(places.hosts, [offer.executor for offer in offers])
        slot = slots[task]
        hosts = [s.hostname for s in sorted(slots, key=lambda s: s.rank)]
        link: Link
        if server is not None:
            link = LocalLink(server.store, slot.rank)
            server.store.expect(hosts)
            server.listen(lambda address: address == places.addresses[0])
        else:
            address = places.addresses[0]
            # Where the server could not take a port, connections are refused.
            endpoint = (address, dict(peers[0]["endpoints"]).get(address, 0))
            link = stack.enter_context(RemoteLink(endpoint, job.secret, slot.rank, hosts[0]))
        outcome = _linked_outcome(context, job, slot, places.addresses[task], link)
        if outcome.failed:
            link.told("failed", host=slot.hostname, why=failure_of(outcome).why)
        link.told("done")
        if server is not None:
            server.store.wait_for_all()
    return outcome


def _linked_outcome(
    context: BarrierTaskContext, job: Job, slot: SlotInfo, address: str, link: Link
) -> RankOutcome:
    """Run the rank."""
    with GlooProxy(link) as proxy:
        env = task_environment(
            job,
            rank_environment(slot),
            listening_environment(address),
            proxy.environment(),
            ranks_key(job.secret),
            gpu_variables(context, job, slot),
        )
        if slot.rank or not job.timeline:
            return _supervise(slot.rank, slot.hostname, job, env, link)
        make_room_for_timeline(env)
        outcome = _supervise(slot.rank, slot.hostname, job, env, link)
        return with_timeline(outcome, env, job.max_bytes)


def _probe_listener(context: BarrierTaskContext, job: Job) -> ProbeListener:
    if job.one_machine:
        return ProbeListener([])
    known = context.getTaskInfos()[context.partitionId()].address
    preferred = known.rpartition(":")[0].strip("[]")
    if job.nics:
        return ProbeListener.on_this_host(preferred, job.nics, "nics")
    variable = {**os.environ, **job.env}.get(INTERFACE_VARIABLE)
    return ProbeListener.on_this_host(preferred, [variable] if variable else [], INTERFACE_VARIABLE)


def _not_run(rank: int, host: str, error_type: str, error: str) -> RankOutcome:
    return RankOutcome(rank, host, None, error_type, error, ended_at=time.time())


def _within(outcome: RankOutcome, max_bytes: int) -> RankOutcome:
    """Return an outcome, or the error that its result is too large for the driver."""
    size = len(outcome.result or b"")
    if size <= max_bytes:
        return outcome
    error = (
        f"Rank {outcome.rank} returned {size / 2**20:,.0f} MiB, and the driver can collect "
        f"{max_bytes / 2**20:,.1f} MiB of each rank. {LESS_RESULTS}"
    )
    return replace(outcome, result=None, error_type=ResultsError.__name__, error=error)


def _supervise(rank: int, host: str, job: Job, env: Mapping[str, str], link: Link) -> RankOutcome:
    """Run the rank's process, and end it if another one failed."""
    call = job.call if isinstance(job.call, bytes) else job.call.value
    start = warm_start(job)
    with (
        TaskOutput(rank, job) as output,
        RankProcess(
            rank, host, call, env, output.on_lines, job.executable, output.on_error_lines, start
        ) as process,
    ):
        (outcome,) = supervise([process], link.failure)
        output.log_error(outcome)
    return outcome
