"""Launch of one rank in its Spark barrier task, from the first check to the last report.

Spark's Python workers on the executors import this module. Runs in the task, except for `outcomes`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from pyspark import BarrierTaskContext

from hvd_estimators.exceptions import DependencyError, GpuError, ResultsError, UnreachableError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank.environment import Master, SlotInfo, assign_ranks, reserved_port
from hvd_estimators.launch.rank.outcome import ABORTED, NOT_STARTED, RankOutcome
from hvd_estimators.launch.rank.output import RateLimiter, Relay, lines_left_out
from hvd_estimators.launch.rank.rank_logs import RankLog
from hvd_estimators.launch.rank.supervisor import RankLauncher, failure_of, supervise
from hvd_estimators.launch.rendezvous.client import (
    LocalRendezvousClient,
    PeerLostError,
    RemoteRendezvousClient,
    RendezvousClient,
)
from hvd_estimators.launch.rendezvous.gloo_http import INTERFACE_VARIABLE, LOOPBACK
from hvd_estimators.launch.rendezvous.server import RendezvousServer
from hvd_estimators.launch.service.events import EventSender, RankOutput
from hvd_estimators.launch.service.exchange import Exchange
from hvd_estimators.launch.service.launch_watch import StageReporter
from hvd_estimators.launch.stage import Stage
from hvd_estimators.launch.task.addresses import HostCandidates, ProbeListener, agree
from hvd_estimators.launch.task.host_checks import (
    check_machines,
    gpu_variables,
    horovod_problem,
    machine_facts,
)
from hvd_estimators.launch.task.job import Job, task_environment, warm_start

if TYPE_CHECKING:
    from hvd_estimators.store import Store

# Spark does not limit an executor's log, a file on its disk. A rank logs at most 1.5 GiB a day.
_LOG_CHARS = 2**26
_LOG_CHARS_PER_SECOND = 2**20 / 60
_LOG_AGAIN_CHARS = 2**16


class TaskOutput:
    """Context manager around a rank's process that forwards the lines of its output.

    All lines go to the executor's log: 64 MiB per rank, and 1 MiB per minute above that. A line
    reports how many lines were dropped. Streams that the job requests also go to the driver. Both
    ends of the output go to the job's `RankLogs`, if it has them.

    Parameters
    ----------
    rank : int
        The rank.
    job : Job
        The driver's settings for every task.
    """

    def __init__(self, rank: int, job: Job) -> None:
        self._rank = rank
        self._job = job
        self._rank_log = RankLog(job.rank_logs, rank)
        self._log_limiter = RateLimiter(_LOG_CHARS, _LOG_CHARS_PER_SECOND)
        self._num_dropped = 0

    def __enter__(self) -> Self:
        job = self._job
        self._rank_log.__enter__()
        self._sender = EventSender(job.service, timeouts.OUTPUT_SEND) if job.streams else None
        self._relay = Relay(self._send) if self._sender is not None else None
        self.on_lines = self._line_handler("stdout" if self._job.separate_streams else "")
        """Handler of standard output lines, or of both streams' lines."""
        self.on_error_lines = self._line_handler("stderr") if self._job.separate_streams else None
        """Handler of standard error lines; None if one handler gets both streams."""
        return self

    def log_error(self, outcome: RankOutcome) -> None:
        """Write the full traceback of a rank's exception to its log, and a remote executor's."""
        self._rank_log.add_outcome(outcome)
        if outcome.report is not None and not self._job.one_machine:
            self._log(outcome.report.full_traceback.splitlines(keepends=True))

    def __exit__(self, *exc_info: object) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._sender is not None:
            self._sender.close()
        self._log_dropped_count()
        self._rank_log.__exit__()

    def _line_handler(self, stream: str) -> Callable[[list[str]], None]:
        is_sent = stream in self._job.streams

        def handle(lines: list[str]) -> None:
            self._rank_log.add(lines)
            if is_sent and self._relay is not None:
                self._relay.put(stream, lines)
            if self._is_logged(is_sent):
                self._log(lines)

        return handle

    def _is_logged(self, is_sent: bool) -> bool:
        """Return whether lines go to the executor's log.

        On one machine, this log is the driver's standard error. There, lines would be shown twice,
        or nothing should be shown.
        """
        if not self._job.one_machine:
            return True
        is_shown = is_sent and self._sender is not None and self._sender.is_connected
        return self._job.verbose > 0 and not is_shown

    def _log(self, lines: list[str]) -> None:
        text = "".join(f"[{self._rank}] {line}" for line in lines)
        if self._log_limiter.left() < (_LOG_AGAIN_CHARS if self._num_dropped else 1):
            self._num_dropped += len(lines)
            return
        self._log_dropped_count()
        self._log_limiter.use(len(text))
        sys.stderr.write(text)

    def _log_dropped_count(self) -> None:
        if self._num_dropped:
            sys.stderr.write(f"[{self._rank}] {lines_left_out(self._num_dropped)}")
            self._num_dropped = 0

    def _send(self, lines: Sequence[tuple[str, str]]) -> None:
        assert self._sender is not None
        self._sender.send_all([RankOutput(self._rank, line, stream) for stream, line in lines])


OUTCOME_SCHEMA = "rank int, host string, chunk int, chunks int, bytes binary"
"""Columns of the rows that `run_rank` yields, as a Spark DDL string."""

LESS_RESULTS = (
    "Return less, or write it to storage and return where; the driver collects more with a larger "
    "spark.driver.memory and spark.driver.maxResultSize."
)
"""Advice for results that are too large."""


# An outcome is sent as several rows, so that no Arrow value approaches 2 GiB.
_CHUNK_BYTES = 64 * 2**20


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
    chunks: dict[int, dict[int, bytes]] = {}
    num_chunks: dict[int, int] = {}
    for row in rows:
        chunks.setdefault(row["rank"], {})[row["chunk"]] = bytes(row["bytes"])
        num_chunks[row["rank"]] = row["chunks"]
    outcomes = [
        RankOutcome(**pickle.loads(b"".join(parts[chunk] for chunk in sorted(parts))))
        for rank, parts in chunks.items()
        if len(parts) == num_chunks[rank]
    ]
    if len(outcomes) < num_ranks and not any(outcome.failed for outcome in outcomes):
        missing = sorted(set(range(num_ranks)) - {outcome.rank for outcome in outcomes})
        raise ResultsError(
            f"All ranks have ended, and what ranks {', '.join(map(str, missing))} returned did not "
            f"reach the driver, whose memory it probably did not fit in. {LESS_RESULTS}"
        )
    for outcome in outcomes:
        if outcome.error_type == ResultsError.__name__:
            raise ResultsError(outcome.error)
    return outcomes


def run_rank(job: Job, stages: StageReporter) -> Iterator[pa.RecordBatch]:
    """Run one rank in a child process and yield its outcome. Runs in a barrier task."""
    outcome = _run_rank(BarrierTaskContext.get(), job, stages)
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


def _run_rank(context: BarrierTaskContext, job: Job, stages: StageReporter) -> RankOutcome:
    task, num_tasks = context.partitionId(), len(context.getTaskInfos())
    stages.enter(Stage.HOST_CHECKS)
    with contextlib.ExitStack() as stack:
        with _probe_listener(context, job) as probes:
            host = probes.candidates()
            message = {"host": asdict(host), **machine_facts(context, job, host.executor)}
            server = None
            if task == 0:
                listening = [LOOPBACK, *host.addresses()]
                server = stack.enter_context(
                    RendezvousServer(job.secret, listening, num_clients=num_tasks)
                )
                port = stack.enter_context(reserved_port())
                message["endpoints"] = server.endpoints
                message["master"] = {"port": port, "run_id": uuid.uuid4().hex}
            # On one host, this is the only exchange.
            exchange = Exchange(context, job, lambda: stages.enter(Stage.EXCHANGE))
            peers = exchange(message)
            candidates = [HostCandidates(**peer["host"]) for peer in peers]
            try:
                problem = check_machines(task, candidates, peers)
                if problem is not None:
                    return _not_run(task, host.name, NOT_STARTED if problem else ABORTED, problem)
                stages.enter(Stage.ADDRESSES)
                names, addresses = agree(candidates, task, exchange)
            except (DependencyError, GpuError, UnreachableError) as error:
                return _not_run(task, host.name, type(error).__name__, str(error))
        # Task 0 has rank 0.
        slots = assign_ranks(names, [peer.executor for peer in candidates])
        slot = slots[task]
        server_address = addresses[0]
        master = Master(server_address, **peers[0]["master"])
        stages.enter(Stage.RENDEZVOUS, slot.rank)
        hosts = [s.hostname for s in sorted(slots, key=lambda s: s.rank)]
        client: RendezvousClient
        if server is not None:
            client = LocalRendezvousClient(server.store, slot.rank)
            server.store.expect(hosts)
            server.listen(server_address)
        else:
            # If the server could not bind a port, connections to port 0 are refused.
            endpoint = (server_address, dict(peers[0]["endpoints"]).get(server_address, 0))
            client = stack.enter_context(
                RemoteRendezvousClient(endpoint, job.secret, slot.rank, hosts[0])
            )
        launcher = RankLauncher(
            job.call if isinstance(job.call, bytes) else job.call.value,
            job.secret,
            functools.partial(task_environment, job),
            master,
            horovod_problem([candidate.name for candidate in candidates], peers),
            job.executable,
            warm_start(job),
        )
        outcome = _run_process(context, job, launcher, slot, addresses[task], client, stages)
        if outcome.failed:
            client.notify("failed", host=slot.hostname, why=failure_of(outcome).why)
        client.notify("done")
        if server is not None:
            server.store.wait_for_all()
    return outcome


def _run_process(
    context: BarrierTaskContext,
    job: Job,
    launcher: RankLauncher,
    slot: SlotInfo,
    address: str,
    client: RendezvousClient,
    stages: StageReporter,
) -> RankOutcome:
    """Run the rank's process, and end it if another rank fails."""
    try:
        # Without this request, only the rank's hvd.init() would find that rank 0 is unreachable.
        client.request("alive")
    except PeerLostError as error:
        outcome = _not_run(slot.rank, slot.hostname, "lost", f"Not started because {error}.")
        return replace(outcome, lost=(error.failure.rank, error.failure.host))
    stages.enter(Stage.PROCESS_START)
    with (
        TaskOutput(slot.rank, job) as output,
        launcher.start(
            slot,
            address,
            client,
            gpu_variables(context, job, slot),
            (output.on_lines, output.on_error_lines),
            on_stage=stages.enter,
        ) as process,
    ):
        (outcome,) = supervise([process], client.failure)
        output.log_error(outcome)
    return outcome


def _probe_listener(context: BarrierTaskContext, job: Job) -> ProbeListener:
    if job.one_machine:
        return ProbeListener([])
    spark_address = context.getTaskInfos()[context.partitionId()].address
    preferred = spark_address.rpartition(":")[0].strip("[]")
    if job.nics:
        return ProbeListener.on_this_host(preferred, job.nics, "nics")
    variable = {**os.environ, **job.env}.get(INTERFACE_VARIABLE)
    return ProbeListener.on_this_host(preferred, [variable] if variable else [], INTERFACE_VARIABLE)


def _not_run(rank: int, host: str, error_type: str, error: str) -> RankOutcome:
    return RankOutcome(rank, host, None, error_type, error, ended_at=time.time())


def _within(outcome: RankOutcome, max_bytes: int) -> RankOutcome:
    """Return an outcome, or an error if its result is too large for the driver."""
    size = len(outcome.result or b"")
    if size <= max_bytes:
        return outcome
    error = (
        f"Rank {outcome.rank} returned {size / 2**20:,.0f} MiB, and the driver can collect "
        f"{max_bytes / 2**20:,.1f} MiB of each rank. {LESS_RESULTS}"
    )
    return replace(outcome, result=None, error_type=ResultsError.__name__, error=error)
