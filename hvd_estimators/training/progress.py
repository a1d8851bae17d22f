"""Progress of a rank, reported to the driver, and warnings when there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from typing_extensions import Self

from hvd_estimators.launch.rank.graceful_stop import grace_seconds
from hvd_estimators.launch.rank.hang_detection import (
    hang_limit,
    leave_stack,
    leaving_signs,
    made_progress,
    seconds_without_progress,
)
from hvd_estimators.launch.service.events import EventSender, RankEpoch, RankOutput, RankProgress
from hvd_estimators.training.spec import EpochMetrics, TrainSpec

__all__ = ["Progress", "stack_of", "tell_driver", "warning_of_hangs"]

# Most steps and validation batches take less; Horovod warns of stalled ranks after a minute.
_SECONDS = 120.0


_LOOK_SECONDS = 10.0


_FRAMES = 8


@contextlib.contextmanager
def warning_of_hangs(rank: int, notify: Callable[[str], None]) -> Iterator[None]:
    """Report once, in the block, each time that this rank makes no progress for two minutes.

    The stack of the main thread is also left for the parent, which adds it to its error if it ends
    the rank.

    Parameters
    ----------
    rank : int
        This rank.
    notify : callable
        Called with a text, from another thread.
    """
    ended = threading.Event()
    main = threading.get_ident()
    # Before the parent ends the rank.
    patience = min(_SECONDS, hang_limit(os.environ) / 2)

    def watch() -> None:
        is_reported = False
        while not ended.wait(min(_LOOK_SECONDS, patience / 2)):
            silent = seconds_without_progress()
            if silent < patience:
                is_reported = False
                continue
            stack = stack_of(main)
            leave_stack(stack)
            if silent >= _SECONDS and not is_reported:
                is_reported = True
                notify(
                    f"Rank {rank} has made no progress for {silent:.0f} s: there was no batch and "
                    f"no end of an epoch. It waits here, the innermost call last:\n{stack}"
                )

    thread = threading.Thread(target=watch, name="hvd_estimators hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def stack_of(thread: int) -> str:
    """Return the innermost calls of a thread, given its identifier."""
    frame = sys._current_frames().get(thread)
    calls = [] if frame is None else traceback.format_stack(frame)[-_FRAMES:]
    return "".join(calls).rstrip()


logger = logging.getLogger(__name__)


_SECONDS_BETWEEN = 0.25


def tell_driver(line: str, verbose: int, rank: int = 0) -> None:
    """Log a line of a rank, and show it on the driver unless that is to be silent."""
    logger.info(line)
    if verbose > 0:
        with contextlib.closing(EventSender()) as sender:
            sender.send(RankOutput(rank, f"{line}\n"))


class Progress:
    """Reports rank 0's steps and epochs to the driver, as a context manager on every rank.

    The rank's parent is shown that there is progress, on all ranks.

    A driver that is interrupted waits for the end of the block, which is to be around the writing
    of checkpoints.

    Parameters
    ----------
    spec : TrainSpec
        The training job; if it is not ``verbose``, only records of epochs are sent.
    rank : int
        This rank.
    """

    def __init__(self, spec: TrainSpec, rank: int) -> None:
        self._rank = rank
        self._sender = EventSender() if rank == 0 else None
        self._verbose = spec.verbose
        self._stack = contextlib.ExitStack()
        self._is_shown = spec.verbose > 0
        self._epochs = spec.epochs
        self._steps = spec.data.train_steps_per_epoch
        self._rows_per_step = spec.data.batch_size * spec.data.num_shards
        self._epoch = self._steps_before = 0
        self._started = self._reported = 0.0

    def __enter__(self) -> Self:
        if self._sender is not None:
            self._sender.ask_to_wait(grace_seconds(os.environ))
        self._stack.enter_context(leaving_signs())
        self._stack.enter_context(warning_of_hangs(self._rank, self._warn))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        if self._sender is not None:
            self._sender.close()

    def start_epoch(self, epoch: int, steps_before: int = 0) -> None:
        """Note the time at which an epoch begins, or goes on after some steps; the first is 0."""
        made_progress()
        self._epoch, self._steps_before = epoch, steps_before
        self._started = self._reported = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether to call `step`: somebody listens, and the last report was some time ago.

        It can be costly to get what is reported, such as a loss from a GPU. To be asked after each
        step, by all ranks.
        """
        made_progress()
        if self._sender is None or not self._is_shown:
            return False
        return time.monotonic() - self._reported > _SECONDS_BETWEEN

    def step(self, step: int, means: Mapping[str, float]) -> None:
        """Report how many steps of the epoch are done, and what was measured so far."""
        self._reported = time.monotonic()
        self._report(step, means, done=False)

    def end_epoch(self, means: Mapping[str, float]) -> None:
        """Report the means of the whole epoch."""
        made_progress()
        self._report(self._steps, means, done=True)

    def record(self, record: EpochMetrics) -> None:
        """Send all that was measured in an epoch, which the driver notes and hands to others."""
        made_progress()
        if self._sender is not None:
            self._sender.send(RankEpoch(0, record.epoch, [row[1:] for row in record.rows()]))

    def _warn(self, text: str) -> None:
        tell_driver(text, self._verbose, self._rank)

    def _report(self, step: int, means: Mapping[str, float], done: bool) -> None:
        if self._sender is None or not self._is_shown:
            return
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._sender.send(
            RankProgress(
                rank=0,
                epoch=self._epoch,
                epochs=self._epochs,
                step=step,
                steps=self._steps,
                rows_per_second=(step - self._steps_before) * self._rows_per_step / seconds,
                means=dict(means),
                done=done,
            )
        )
