"""Launches and restarts of a fit's ranks.

This module decides if and when the ranks are relaunched, and how many. The ranks themselves resume
from the run's newest checkpoint. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from hvd_estimators.exceptions import (
    SlotsError,
    StoreUnavailableError,
    UnreachableError,
    WorkerFailedError,
)
from hvd_estimators.fitting.record import now
from hvd_estimators.fitting.run import Run
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.cluster.jobs import describing
from hvd_estimators.launch.rank.hang_detection import STALL_VARIABLE
from hvd_estimators.launch.rank.rank_logs import RankLogs, logging_ranks
from hvd_estimators.launch.relaunch import (
    available,
    await_relaunch_slots,
    final_error,
    summary,
    too_few_slots,
)
from hvd_estimators.launch.service.events import Event, Handler, RankEpoch, RankProgress
from hvd_estimators.launch.validation import seconds_given
from hvd_estimators.store import Store
from hvd_estimators.store.checkpoints import checkpoint_path, positions
from hvd_estimators.store.paths import Position, manifest_of
from hvd_estimators.store.redaction import redacted
from hvd_estimators.training.call_transfer import CallTransfer, StoredCall, Trainer, train_stored
from hvd_estimators.training.spec import TrainSpec

logger = logging.getLogger(__name__)

# Launches of a run whose logs of ranks are kept.
_LOGGED_LAUNCHES = 10
_LAUNCH_FOLDER = re.compile(r"\d{8}-\d{6}-\d{6}")
# A driver that was asked to end may take this long, which is longer than ranks take to end.
_EXIT_SECONDS = 60.0
# Half an hour, see `hvd_estimators.launch.rank.hang_detection`.
_STALL_SECONDS = 1800
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# An executor that is about to shut down still counts among the task slots.
_LEAVING_PAUSE = 10.0

_LEAVING = "TrainingInterruptedError"
# Exceptions that a rank raises for external reasons: a lost peer, a machine that is about to shut
# down, a store that does not respond, or a killed reader process.
_TEMPORARY = {
    *("HorovodInternalError", "CollectiveError", "ReaderError", "StoreUnavailableError"),
    _LEAVING,
}
# Horovod's messages for mismatched calls.
_MISMATCH = re.compile(r"Mismatched|Duplicate tensor name|must have the same|Invalid")


class Launch:
    """Launcher of a fit's ranks, called with a backend once per launch.

    Parameters
    ----------
    run : Run
        The run. Its fencing tokens stop ranks of earlier launches from writing.
    handover : CallTransfer
        Writes the trainer and its spec to the store for the ranks.
    train : callable
        The function that every rank calls.
    spec_for : callable
        Returns the `TrainSpec` for a given number of ranks.
    spec : TrainSpec
        The spec of the first launch.

    Attributes
    ----------
    spec : TrainSpec
        The spec of the newest launch.
    """

    def __init__(
        self,
        run: Run,
        handover: CallTransfer,
        train: Trainer,
        spec_for: Callable[[int], TrainSpec],
        spec: TrainSpec,
    ) -> None:
        self.spec = spec
        self._run = run
        self._handover = handover
        self._train = train
        self._spec_for = spec_for
        self._call = handover.put(train)
        self._number = 0

    def __call__(
        self, backend: Backend, env: Mapping[str, str | None], handler: Handler
    ) -> list[Any]:
        """Launch the ranks and return their results."""
        num_ranks = backend.num_processes()
        if num_ranks != self.spec.data.num_ranks:
            self.spec = self._spec_for(num_ranks)
            self._call = self._handover.put(self._train, self.spec)
        call = replace(self._call, fence=self._run.fencing_token(self._number))
        self._number += 1
        run_id, rows = self._run.paths.run_id, self.spec.data.train_plan.total_rows
        logs = self._rank_logs()
        purpose = f"Train run {run_id} on {num_ranks} ranks: {rows:,} rows"
        try:
            with describing(purpose), logging_ranks(logs):
                return backend.run(
                    train_stored, args=(call,), kwargs={}, env=dict(env), on_event=handler
                )
        except WorkerFailedError as error:
            # Backends of other packages write no logs.
            with contextlib.suppress(Exception):
                if logs is not None and logs.store.names(logs.folder):
                    error.args = (f"{error}\nThe output of all ranks is in {logs.folder}.",)
            raise

    def _rank_logs(self) -> RankLogs | None:
        """Return the logs of a new launch, and delete the logs of the oldest launches."""
        store = self._run.store
        path = store.get_rank_logs_path(self._run.paths.run_id)
        if path is None:
            return None
        try:
            # People may keep their own files beside the logs.
            launches = sorted(filter(_LAUNCH_FOLDER.fullmatch, store.names(path)))
            for name in launches[: -(_LOGGED_LAUNCHES - 1)]:
                store.delete(f"{path}/{name}")
        except Exception as error:
            text = redacted(str(error), store.secrets)
            logger.warning("Old logs of ranks could not be deleted: %s", text)
        moment = datetime.datetime.now(datetime.UTC)
        return RankLogs(store, f"{path}/{moment:%Y%m%d-%H%M%S-%f}")


def warming_up(
    backend: Backend, train: Trainer, store: Store, env: Mapping[str, str | None]
) -> contextlib.AbstractContextManager[None]:
    """Let machines import the framework during the block, before the ranks need it."""
    call = StoredCall(store, "", "", "", getattr(train, "__module__", ""))
    return backend.warming_up(train_stored, (call,), env)


class ProgressAcrossLaunches:
    """Filter of the ranks' events that removes events from earlier launches.

    Relaunched ranks repeat the training after the checkpoint that they resume from.

    Attributes
    ----------
    newest : (int, int) or None
        Latest epoch, from 0, and steps within it, as reported by the ranks of the current launch.
        None before their first report.
    """

    def __init__(self) -> None:
        self.newest: tuple[int, int] | None = None
        self._reported: set[tuple[str, int]] = set()
        self._reported_before: set[tuple[str, int]] = set()

    def restart(self) -> None:
        """Record that the ranks are relaunched."""
        self.newest = None
        self._reported_before = set(self._reported)

    def handler(self, handler: Handler) -> Handler:
        """Return a handler that passes only new events to another handler."""

        def handle(event: Event) -> None:
            if self._is_new(event):
                handler(event)

        return handle

    def _is_new(self, event: Event) -> bool:
        if not isinstance(event, (RankEpoch, RankProgress)):
            return True
        position = (event.epoch + 1, 0)
        if isinstance(event, RankProgress) and not event.done:
            position = (event.epoch, event.step)
        else:
            self._reported.add((event.kind, event.epoch))
        self.newest = max(self.newest or (0, 0), position)
        return (event.kind, event.epoch) not in self._reported_before


@contextlib.contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Raise `SystemExit` in the block on SIGTERM, which then ends the program.

    By default, SIGTERM ends the process at once, and the fit cannot record how the run ended. The
    exit status is 143, as in a shell. This context manager does nothing if the program handles
    SIGTERM itself, or outside the main thread, which alone receives signals.

    Do not use this for blocks that wait for Spark: an interrupted call to the JVM blocks the next
    call. If a call blocks nevertheless, the signal ends the process one minute later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    late = threading.Timer(_EXIT_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    late.daemon = True

    def end(number: int, frame: FrameType | None) -> None:
        # Only once: a second SIGTERM means that the sender does not want to wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        late.start()
        logger.warning("The driver was asked to end (SIGTERM).")
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        late.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def would_recur(error: WorkerFailedError) -> bool:
    """Return whether relaunched ranks would fail in the same way.

    They would if a rank exited by itself, or if Spark failed for an unknown reason. They would also
    if a rank raised an exception, unless the cause was a lost peer, a lost reader, an unavailable
    store or SIGTERM. Mismatched calls of Horovod do not count as a lost peer.
    """
    if error.cause != "raised":
        return error.cause not in ("killed", "stalled", "lost")
    is_mismatch = error.error_type == "HorovodInternalError" and _MISMATCH.search(str(error))
    return error.error_type not in _TEMPORARY or bool(is_mismatch)


@dataclass
class Restarts:
    """Restart policy for the launches of one fit.

    Attributes
    ----------
    run : Run
        The run, with its checkpoints before the fit.
    spec : TrainSpec
        The spec of the first launch.
    limit : int
        Maximum number of restarts.
    least : int or None
        Minimum number of ranks; None for the number of the first launch.
    note : callable
        Called with the record of each restart.
    progress : ProgressAcrossLaunches
        Progress of the ranks.
    failures : list of WorkerFailedError
        Errors of the launches that were followed by a relaunch.
    """

    run: Run
    spec: TrainSpec
    limit: int
    least: int | None
    note: Callable[[Mapping[str, Any]], None]
    progress: ProgressAcrossLaunches = field(default_factory=ProgressAcrossLaunches)
    failures: list[WorkerFailedError] = field(default_factory=list)
    _deadline: float = math.inf

    def launch(self, backend: Backend, launch: Callable[[Backend], list[Any]]) -> list[Any]:
        """Launch the ranks until a launch succeeds, and return their results.

        Parameters
        ----------
        backend : Backend
            Backend of the first launch, and of later launches if there are enough task slots.
        launch : callable
            Launches the ranks on a backend.

        Raises
        ------
        WorkerFailedError
            If a rank failed in a way that would recur, or if the restarts are used up.
        SlotsError
            If there were too few task slots for too long.
        JobCancelledError
            If the thread's Spark jobs were cancelled, even while no job was running.
        """
        current, before, pauses = backend, self.run.newest, _pauses()
        while True:
            started = time.monotonic()
            try:
                return launch(current)
            except WorkerFailedError as error:
                self._add(error)
                lost_after = time.monotonic() - started
                position = self._newest()
                if position != before:
                    before, pauses = position, _pauses(0.0)
                lost = self._lost(position, lost_after)
                pause = next(pauses)
                if error.error_type == _LEAVING:
                    pause = max(pause, _LEAVING_PAUSE)
                time.sleep(pause)
                current = self._for_slots(backend, current)
                self._report(lost, position, current.num_processes())
            except (SlotsError, UnreachableError) as error:
                # Task slots may have been lost since they were counted.
                if not self.failures:
                    raise
                if time.monotonic() > self._deadline:
                    raise self._too_few(current, str(error)) from self.failures[-1]
                time.sleep(_FIRST_PAUSE)
                current = self._for_slots(backend, current)

    def environment(self) -> dict[str, str]:
        """Return environment variables for the ranks that enable the detection of hangs."""
        return {STALL_VARIABLE: str(_STALL_SECONDS)} if self.limit else {}

    def _add(self, error: WorkerFailedError) -> None:
        """Record a failed launch; raise its error if no restart may follow."""
        recurs = would_recur(error)
        if not self.limit or (recurs and not self.failures):
            raise error
        why = ""
        if recurs:
            why = "; a failure of this kind comes back"
        elif len(self.failures) >= self.limit:
            why = f", and max_restarts={self.limit} allows no more"
        elif self.run.lost:
            why = ", and another process trains this run by now"
        if why:
            raise final_error(error, self.failures, why) from error
        self.failures.append(error)
        self._deadline = time.monotonic() + seconds_given(None, "HOROVOD_ELASTIC_TIMEOUT")

    def _newest(self) -> Position | None:
        """Return the newest checkpoint, waiting until the store is available."""
        while True:
            try:
                return max(positions(self.spec.store, self.spec.run), default=None)
            except StoreUnavailableError as error:
                if time.monotonic() > self._deadline:
                    raise error from self.failures[-1]
                time.sleep(_FIRST_PAUSE)

    def _lost(self, position: Position | None, launched: float) -> dict[str, Any]:
        """Return the lost training: seconds since the checkpoint, and steps if known.

        Parameters
        ----------
        position : Position or None
            The checkpoint to resume from.
        launched : float
            Duration of the launch in seconds.
        """
        spec = self.spec
        lost: dict[str, Any] = {"seconds": launched, "epoch": 0, "step": 0, "steps": None}
        if position is not None:
            lost["epoch"] = position.epoch
            lost["step"] = spec.data.batches_before(position.epoch, position.rows)
            written = None
            with contextlib.suppress(OSError):  # the ranks will find out if the store is available
                written = spec.store.modified(manifest_of(checkpoint_path(spec.run, position)))
            if written is not None:
                moment = datetime.datetime.now(datetime.UTC)
                lost["seconds"] = min(launched, max((moment - written).total_seconds(), 0.0))
        newest = self.progress.newest
        self.progress.restart()
        if newest is not None and spec.verbose > 0:  # otherwise ranks report only epochs
            epochs = newest[0] - lost["epoch"]
            steps = epochs * spec.data.train_steps_per_epoch + newest[1] - lost["step"]
            lost["steps"] = max(steps, 0)
        return lost

    def _for_slots(self, backend: Backend, before: Backend) -> Backend:
        """Wait for enough task slots, and return a backend with as many ranks as fit."""
        most = backend.num_processes()
        least = most if self.least is None else self.least
        if least < most and backend.resized(least) is None:
            least = most
        slots = backend.task_slots()
        if slots is None:
            return backend

        def count() -> int:
            return backend.task_slots() or 0

        ranks, failure = before.num_processes(), self.failures[-1]
        slots = await_relaunch_slots(failure, count, least, ranks, self._deadline)
        if slots >= most:
            return backend
        resized = backend.resized(slots) if slots >= least else None
        if resized is None:
            raise self._too_few(backend, available(slots)) from failure
        return resized

    def _report(self, lost: Mapping[str, Any], position: Position | None, num_ranks: int) -> None:
        """Log and record a restart and the lost training."""
        error, number = self.failures[-1], len(self.failures)
        spec = self.spec
        if position is not None:
            source = f"from the checkpoint of epoch {lost['epoch'] + 1}, step {lost['step']}"
        elif spec.run.checkpoints_path is None:
            source = "from the beginning of this fit, because the store keeps no checkpoints"
        else:
            source = "from the beginning, because the run has no checkpoint yet"
        steps = "" if lost["steps"] is None else f"{lost['steps']} steps and "
        logger.warning(
            "Run %r: %s %d ranks are launched again (restart %d of at most %d) and resume %s: "
            "%s%.1f s of training are lost.",
            *(spec.run.run_id, summary(error), num_ranks, number, self.limit),
            *(source, steps, lost["seconds"]),
        )
        self.note(
            {
                "at": now(),
                "rank": error.rank,
                "host": error.host,
                "cause": error.cause,
                "error_type": error.error_type or None,
                "num_ranks": num_ranks,
                **{name: lost[name] for name in ("epoch", "step")},
                "lost_steps": lost["steps"],
                "lost_seconds": round(lost["seconds"], 3),
            }
        )

    def _too_few(self, backend: Backend, reason: str) -> SlotsError:
        least = backend.num_processes() if self.least is None else self.least
        limit = "HOROVOD_ELASTIC_TIMEOUT (600 s by default)"
        return too_few_slots(self.failures, least, limit, reason)


def _pauses(*first: float) -> Iterator[float]:
    """Yield the pauses, in seconds, before consecutive restarts without a new checkpoint."""
    yield from first
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
