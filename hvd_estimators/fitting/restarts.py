"""Launches and relaunches of a fit's ranks.

This module decides if and when the ranks are relaunched, and how many. The ranks themselves resume
from the run's newest checkpoint. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

from hvd_estimators.exceptions import (
    StoreUnavailableError,
    TrainingInterruptedError,
    WorkerFailedError,
)
from hvd_estimators.fitting.record import now
from hvd_estimators.fitting.run import Run
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.cluster.jobs import describing
from hvd_estimators.launch.rank.hang_detection import STALL_VARIABLE
from hvd_estimators.launch.relaunch import RelaunchLoop, summary
from hvd_estimators.launch.service.events import Handler, LaunchStart
from hvd_estimators.launch.validation import seconds_given
from hvd_estimators.store import Store
from hvd_estimators.store.checkpoints import positions
from hvd_estimators.store.paths import Position
from hvd_estimators.training.call_transfer import CallTransfer, StoredCall, Trainer, train_stored
from hvd_estimators.training.spec import TrainSpec

logger = logging.getLogger(__name__)

# A driver that was asked to end may take this long, which is longer than ranks take to end.
_EXIT_SECONDS = 60.0
# Half an hour, see `hvd_estimators.launch.rank.hang_detection`.
_STALL_SECONDS = 1800
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# After the first of several notices, see `FitLaunches._leaving_pause`.
_LEAVING_PAUSE = 10.0


def warming_up(
    backend: Backend, train: Trainer, store: Store, env: Mapping[str, str | None]
) -> contextlib.AbstractContextManager[None]:
    """Let machines import the framework during the block, before the ranks need it."""
    call = StoredCall(store, "", "", "", getattr(train, "__module__", ""))
    return backend.warming_up(train_stored, (call,), env)


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


class FitLaunches(RelaunchLoop):
    """Launches of one fit's ranks.

    Parameters
    ----------
    run : Run
        The run, with its checkpoints before the fit. Its fencing tokens stop ranks of earlier
        launches from writing.
    transfer : CallTransfer
        Writes the trainer and its spec to the store for the ranks.
    train : callable
        The function that every rank calls.
    spec_for : callable
        Returns the `TrainSpec` for a given number of ranks.
    spec : TrainSpec
        The spec of the first launch.
    limit : int
        Maximum number of restarts.
    least : int or None
        Minimum number of ranks; None for the number of the first launch.

    Attributes
    ----------
    spec : TrainSpec
        The spec of the newest launch.
    """

    def __init__(
        self,
        run: Run,
        transfer: CallTransfer,
        train: Trainer,
        spec_for: Callable[[int], TrainSpec],
        spec: TrainSpec,
        limit: int,
        least: int | None,
    ) -> None:
        timeout = seconds_given(None, "HOROVOD_ELASTIC_TIMEOUT")
        super().__init__(least, None, timeout, "HOROVOD_ELASTIC_TIMEOUT")
        self.spec, self._limit = spec, limit
        self._run, self._transfer, self._train, self._spec_for = run, transfer, train, spec_for
        self._call = transfer.put(train)
        self._number = itertools.count()
        self._position, self._pauses = run.newest, _pauses()

    def results(
        self,
        backend: Backend,
        env: Mapping[str, str | None],
        handler: Handler,
        note: Callable[[Mapping[str, Any]], None],
    ) -> list[Any]:
        """Launch the ranks until a launch succeeds, and return their results.

        Parameters
        ----------
        backend : Backend
            Backend of the first launch.
        env : mapping
            Environment variables of the ranks.
        handler : callable
            Handler of the ranks' events.
        note : callable
            Called with the record of each restart.
        """
        # Ranks that all hang are found, too.
        stalls = {STALL_VARIABLE: str(_STALL_SECONDS)} if self._limit else {}
        self._env, self._handler, self._note = {**stalls, **env}, handler, note
        return self.launch(backend)

    def run_on(self, backend: Backend) -> list[Any]:
        """Launch the ranks once."""
        num_ranks = backend.num_processes()
        if num_ranks != self.spec.data.num_ranks:
            self.spec = self._spec_for(num_ranks)
            self._call = self._transfer.put(self._train, self.spec)
        self._handler(LaunchStart(num_ranks))
        call = replace(self._call, fence=self._run.fencing_token(next(self._number)))
        run_id, rows = self._run.paths.run_id, self.spec.data.train_plan.total_rows
        with describing(f"Train run {run_id} on {num_ranks} ranks: {rows:,} rows"):
            return backend.run(
                train_stored, args=(call,), kwargs={}, env=dict(self._env), on_event=self._handler
            )

    def reason_to_end(self, error: WorkerFailedError) -> str | None:
        """Return why no restart may follow: the limit, the error, or another process's fit."""
        if not self._limit or not (error.is_transient or self.failures):
            return ""
        if not error.is_transient:
            return "; a failure of this kind comes back"
        if len(self.failures) >= self._limit:
            return f", and max_restarts={self._limit} allows no more"
        if self._run.lost:
            return ", and another process trains this run by now"
        return None

    def after_failure(self) -> None:
        """Find the checkpoint to resume from, and pause."""
        position = self._newest()
        if position != self._position:
            self._position, self._pauses = position, _pauses(0.0)
        time.sleep(max(next(self._pauses), self._leaving_pause()))

    def _leaving_pause(self) -> float:
        """Return the pause after notices that a machine is about to go; doubles with each notice.

        The machine still takes ranks until it has gone, and then gives notice at once.
        """
        leaving = TrainingInterruptedError.__name__
        in_a_row = itertools.takewhile(lambda e: e.error_type == leaving, reversed(self.failures))
        number = len(list(in_a_row))
        return min(_LEAVING_PAUSE * 2 ** (number - 1), _LONGEST_PAUSE) if number else 0.0

    def _newest(self) -> Position | None:
        """Return the newest checkpoint, waiting until the store is available."""
        while True:
            try:
                return max(positions(self.spec.store, self.spec.run), default=None)
            except StoreUnavailableError as error:
                if time.monotonic() > self._deadline:
                    raise error from self.failures[-1]
                time.sleep(_FIRST_PAUSE)

    def before_relaunch(self, num_ranks: int) -> None:
        """Log and record a restart."""
        error, number = self.failures[-1], len(self.failures)
        spec, position, epoch, step = self.spec, self._position, 0, 0
        if position is not None:
            epoch, step = position.epoch, spec.data.batches_before(position.epoch, position.rows)
            source = f"from the checkpoint of epoch {epoch + 1}, step {step}"
        elif spec.run.checkpoints_path is None:
            source = "from the beginning of this fit, because the store keeps no checkpoints"
        else:
            source = "from the beginning, because the run has no checkpoint yet"
        logger.warning(
            "Run %r: %s %d ranks are launched again (restart %d of at most %d) and resume %s.",
            *(spec.run.run_id, summary(error), num_ranks, number, self._limit, source),
        )
        self._note(
            {
                "at": now(),
                "rank": error.rank,
                "host": error.host,
                "cause": error.cause,
                "error_type": error.error_type or None,
                "num_ranks": num_ranks,
                "epoch": epoch,
                "step": step,
            }
        )


def _pauses(*first: float) -> Iterator[float]:
    """Yield the pauses, in seconds, before consecutive restarts without a new checkpoint."""
    yield from first
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
