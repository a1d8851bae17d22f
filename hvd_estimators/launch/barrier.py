"""What runs in each Spark barrier task: one rank, watched and reported on.

Imported by Spark's Python workers on the executors.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import BarrierTaskContext, Broadcast

from hvd_estimators.exceptions import ResultsError, UnreachableError
from hvd_estimators.launch.addresses import INTERFACE_VARIABLE, listening_environment
from hvd_estimators.launch.events import EVENTS_VARIABLE, EventSender
from hvd_estimators.launch.gpu import visible_gpu
from hvd_estimators.launch.process import RankOutcome, RankProcess
from hvd_estimators.launch.reachability import Offer, ProbeListener, agree
from hvd_estimators.launch.rendezvous import (
    Rendezvous,
    Server,
    assign_ranks,
    child_environment,
    python_path,
    rank_environment,
)

if TYPE_CHECKING:
    from hvd_estimators.store import Store

__all__ = ["LESS_RESULTS", "OUTCOME_SCHEMA", "Job", "hosts_without", "outcomes", "run_task"]

OUTCOME_SCHEMA = "rank int, host string, chunk int, chunks int, bytes binary"
"""Columns of what `run_task` yields, as a Spark DDL string."""

LESS_RESULTS = (
    "Return less, or write it to storage and return where; the driver collects more with a larger "
    "spark.driver.memory and spark.driver.maxResultSize."
)
"""What to do about results that are too large."""

_POLL_SECONDS = 0.1
_ABORT_POLLS = 10
# A rank whose peer failed mostly ends by itself, with an error of its own that is worth having.
_GRACE_SECONDS = 3.0
# One outcome travels as several rows, so that no Arrow value comes near 2 GiB.
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Job:
    """What every task needs; crosses from the driver to the tasks.

    ``call`` is what `pickle_call` returned, ``max_bytes`` what an outcome may have at most.
    """

    call: bytes | Broadcast[bytes]
    max_bytes: int
    driver_env: dict[str, str] = field(repr=False)
    env: dict[str, str | None] = field(repr=False)
    driver_path: tuple[str, ...]
    executable: str | None
    verbose: int


def hosts_without(
    batches: Iterator[pa.RecordBatch], *, store: Store, path: str
) -> Iterator[pa.RecordBatch]:
    """Yield this machine's name if it does not see a file. Runs in a barrier task."""
    for _ in batches:
        pass
    if not store.exists(path):
        yield pa.RecordBatch.from_pydict({"host": [socket.gethostname()]})


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


def run_task(batches: Iterator[pa.RecordBatch], *, job: Job) -> Iterator[pa.RecordBatch]:
    """Run one rank in a child process and yield its outcome. Runs in a barrier task."""
    for _ in batches:
        pass
    outcome = _run_rank(BarrierTaskContext.get(), job)
    document = pickle.dumps(asdict(_within(outcome, job.max_bytes)))
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
    resources = context.resources()
    gpus = list(resources["gpu"].addresses) if "gpu" in resources else []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server()) if task == 0 else None
        with _probe_listener(context, job) as probes:
            # One exchange tells everything on one host: each takes about a second in Spark.
            mine = {"offer": asdict(probes.offer()), "port": server.port if server else None}
            peers = [json.loads(text) for text in context.allGather(json.dumps(mine))]
            offers = [Offer(**peer["offer"]) for peer in peers]
            try:
                places = agree(offers, task, context.allGather)
            except UnreachableError as error:
                return RankOutcome(
                    task,
                    offers[task].name,
                    None,
                    UnreachableError.__name__,
                    str(error),
                    ended_at=time.time(),
                )
        slots = assign_ranks(places.hosts)
        slot = slots[task]
        if server is not None:
            server.expect(slots)
        rendezvous = Rendezvous(places.addresses[0], peers[0]["port"])
        env = child_environment(
            os.environ,
            job.driver_env,
            {"PYTHONPATH": python_path(sys.path, job.driver_path)},
            rank_environment(slot, rendezvous),
            listening_environment(places.addresses[task]),
            visible_gpu(gpus, slot.local_rank, {**os.environ, **job.driver_env, **job.env}),
            job.env,
        )
        outcome = _supervise(slot.rank, slot.hostname, job, env, rendezvous)
        rendezvous.tell_done(slot.rank)
        if server is not None:
            _wait_for_all(rendezvous, len(slots))
    return outcome


def _probe_listener(context: BarrierTaskContext, job: Job) -> ProbeListener:
    known = context.getTaskInfos()[context.partitionId()].address
    interface = {**os.environ, **job.env}.get(INTERFACE_VARIABLE)
    return ProbeListener.on_this_host(known.rpartition(":")[0].strip("[]"), interface or "")


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


def _wait_for_all(rendezvous: Rendezvous, num_ranks: int) -> None:
    """Wait until no rank needs the rendezvous server any more."""
    for rank in range(num_ranks):
        while not rendezvous.done_told(rank):
            time.sleep(_POLL_SECONDS)


def _supervise(
    rank: int, host: str, job: Job, env: Mapping[str, str], rendezvous: Rendezvous
) -> RankOutcome:
    """Run the rank's process; tell the others if it fails, and end it if another one did."""
    sender = EventSender(env.get(EVENTS_VARIABLE)) if job.verbose >= 2 else None

    def relay(line: str) -> None:
        sys.stderr.write(f"[{rank}] {line}")
        if sender is not None:
            sender.send(kind="output", rank=rank, line=line)

    call = job.call if isinstance(job.call, bytes) else job.call.value
    with RankProcess(rank, host, call, env, relay, job.executable) as process:
        deadline = float("inf")
        polls = 0
        while process.running():
            time.sleep(_POLL_SECONDS)
            polls += 1
            if deadline == float("inf") and polls % _ABORT_POLLS == 0 and rendezvous.failure_told():
                deadline = time.monotonic() + _GRACE_SECONDS
            if time.monotonic() > deadline:
                outcome = process.abort()
                break
        else:
            outcome = process.outcome()
    if outcome.failed:
        rendezvous.tell_failure()
    if sender is not None:
        sender.close()
    return outcome
