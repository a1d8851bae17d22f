"""Progress reports of a rank to the driver, and warnings if a rank makes no progress."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from hvd_estimators.launch.rank.graceful_stop import grace_seconds
from hvd_estimators.launch.rank.hang_detection import (
    hang_limit,
    made_progress,
    recording_progress,
    seconds_without_progress,
)
from hvd_estimators.launch.service.events import EventSender, RankEpoch, RankOutput, RankProgress
from hvd_estimators.training.spec import EpochMetrics, TrainSpec

logger = logging.getLogger(__name__)

# Most steps and validation batches take less time. Horovod warns of stalled ranks after a minute.
_HANG_SECONDS = 120.0
_LOOK_SECONDS = 10.0
_FRAMES = 8

# Time between two reports to the driver.
_REPORT_SECONDS = 0.25


@contextlib.contextmanager
def warning_of_hangs(rank: int, notify: Callable[[str], None]) -> Iterator[None]:
    """Report each period of two minutes or more in which this rank makes no progress, once.

    Parameters
    ----------
    rank : int
        This rank.
    notify : callable
        Called with a text, from another thread.
    """
    finished = threading.Event()
    main = threading.get_ident()
    # Shorter than the time after which the parent ends the rank.
    patience = min(_HANG_SECONDS, hang_limit(os.environ) / 2)

    def watch() -> None:
        is_reported = False
        while not finished.wait(min(_LOOK_SECONDS, patience / 2)):
            silent = seconds_without_progress()
            if silent >= patience and not is_reported:
                notify(
                    f"Rank {rank} has made no progress for {silent:.0f} s: there was no batch and "
                    f"no end of an epoch. It waits here, the innermost call last:\n{stack_of(main)}"
                )
            is_reported = silent >= patience

    thread = threading.Thread(target=watch, name="hvd_estimators hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def stack_of(thread: int) -> str:
    """Return the innermost calls of a thread, given its identifier."""
    frame = sys._current_frames().get(thread)
    calls = [] if frame is None else traceback.format_stack(frame)[-_FRAMES:]
    return "".join(calls).rstrip()


def notify_driver(line: str, verbose: int, rank: int = 0) -> None:
    """Log a line of a rank, and show it on the driver if ``verbose`` is above 0."""
    logger.info(line)
    if verbose > 0:
        with contextlib.closing(EventSender()) as sender:
            sender.send(RankOutput(rank, f"{line}\n"))


class Progress:
    """Reports rank 0's steps and epochs to the driver, as a context manager on every rank.

    Every rank also notifies its parent of its progress. An interrupted driver waits for the end of
    the block. The block should therefore enclose the writing of checkpoints.

    Parameters
    ----------
    spec : TrainSpec
        The training job; if its ``verbose`` is 0, only epoch records are sent.
    rank : int
        This rank.
    """

    def __init__(self, spec: TrainSpec, rank: int) -> None:
        self._rank = rank
        self._sender = EventSender() if rank == 0 else None
        self._verbose = spec.verbose
        self._stack = contextlib.ExitStack()
        self._epochs = spec.epochs
        self._steps = spec.data.train_steps_per_epoch
        self._epoch = self._steps_before = 0
        self._started = self._reported = 0.0
        self._rows_after = spec.data.rows_after
        self._train_seconds: float | None = None

    def __enter__(self) -> Self:
        if self._sender is not None:
            self._sender.ask_to_wait(grace_seconds(os.environ))
        self._stack.enter_context(recording_progress())
        self._stack.enter_context(warning_of_hangs(self._rank, self._warn))
        return self

    def when_asked_to_stop(self, stop: Callable[[], object]) -> None:
        """Call a function if the driver asks the ranks to end. Only rank 0 is asked."""
        if self._sender is not None:
            self._sender.when_asked_to_stop(stop)

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        if self._sender is not None:
            self._sender.close()

    def start_epoch(self, epoch: int, steps_before: int = 0) -> None:
        """Record the time at which an epoch (from 0) begins, or resumes after some steps."""
        made_progress()
        self._epoch, self._steps_before = epoch, steps_before
        self._started = self._reported = time.monotonic()
        self._train_seconds = None

    def end_training(self) -> None:
        """Record the time at which the epoch's last step ended, before any validation."""
        self._train_seconds = time.monotonic() - self._started

    @property
    def rows_per_second(self) -> float:
        """Training rows of all ranks per second, in the part of the epoch that this fit trained."""
        return self._rate_after(self._steps)

    def count_step(self) -> bool:
        """Count a step; return whether to call `step`, because the last report is old enough.

        The reported values can be expensive to get, such as a loss from a GPU. All ranks must call
        this method after each step.
        """
        made_progress()
        if self._sender is None or self._verbose <= 0:
            return False
        return time.monotonic() - self._reported > _REPORT_SECONDS

    def step(self, step: int, means: Mapping[str, float]) -> None:
        """Report the number of completed steps in the epoch, and the metric means so far."""
        self._reported = time.monotonic()
        self._report(step, means, done=False)

    def end_epoch(self, means: Mapping[str, float]) -> None:
        """Report the means of the whole epoch."""
        made_progress()
        self._report(self._steps, means, done=True)

    def record(self, record: EpochMetrics, learning_rates: Sequence[float] = ()) -> None:
        """Send all metrics of an epoch to the driver, which records and logs them.

        Parameters
        ----------
        record : EpochMetrics
            The losses and metrics.
        learning_rates : sequence of float
            The optimizer's rates, by parameter group, without the factor for the number of ranks.
        """
        made_progress()
        if self._sender is None:
            return
        names = (
            ["learning_rate"]
            if len(learning_rates) == 1
            else [f"learning_rate_{group}" for group in range(len(learning_rates))]
        )
        rates = dict(zip(names, learning_rates, strict=True))
        rates["rows_per_second"] = self.rows_per_second
        self._sender.send(RankEpoch(0, record.epoch, [row[1:] for row in record.rows()], rates))

    def _warn(self, text: str) -> None:
        notify_driver(text, self._verbose, self._rank)

    def _rate_after(self, steps: int) -> float:
        """Return the rows per second of an epoch's training steps so far, without validation."""
        before, after = (self._rows_after(self._epoch, n) for n in (self._steps_before, steps))
        seconds = self._train_seconds
        if seconds is None:
            seconds = time.monotonic() - self._started
        return (after - before) / max(seconds, 1e-9)

    def _report(self, step: int, means: Mapping[str, float], done: bool) -> None:
        if self._sender is None or self._verbose <= 0:
            return
        self._sender.send(
            RankProgress(
                rank=0,
                epoch=self._epoch,
                epochs=self._epochs,
                step=step,
                steps=self._steps,
                rows_per_second=self._rate_after(step),
                means=dict(means),
                done=done,
            )
        )
