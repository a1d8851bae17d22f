"""Stop requests: ranks agree on a step, checkpoint there, and stop together.

A process that wants a rank to end sends SIGTERM. It can be the rank's guardian, if the task or the
driver has ended. It can also be the scheduler of a cluster that preempts a machine. The ranks of a
job receive the signal at different times, or only one of them does. They must not stop at different
steps, because the others would then wait forever. Therefore the ranks sum up, about once a second,
how many of them were asked to stop. Between two sums, a step only decrements a counter.

During validation, ranks do not synchronize, because each rank has a different number of batches.
They agree on a stop request after it.

Runs on the ranks; imports no framework.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

from typing_extensions import Self

from hvd_estimators.exceptions import TrainingInterruptedError
from hvd_estimators.launch.rank.graceful_stop import asking_for_grace, mute_if_unheard
from hvd_estimators.launch.rank.hang_detection import seconds_without_progress
from hvd_estimators.training.progress import stack_of
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.spec import TrainSpec

__all__ = [
    "StopRequest",
    "interrupted",
    "stopped_before",
    "without_further_epochs",
]


S = TypeVar("S", bound=TrainSpec)


def without_further_epochs(spec: S, state: RunState | None) -> S:
    """Return a job without further epochs if its run was stopped and should not resume.

    Runs on every rank, after the run's newest checkpoint was restored.

    Parameters
    ----------
    spec : TrainSpec
        The job.
    state : RunState or None
        The restored state.
    """
    if state is None or not stopped_before(spec, state):
        return spec
    return replace(spec, epochs=min(spec.epochs, state.epoch))


def stopped_before(spec: TrainSpec, state: RunState | None) -> bool:
    """Return whether a run was stopped and should not resume."""
    return state is not None and state.stopped and not spec.resume_stopped


logger = logging.getLogger(__name__)


_SECONDS_BETWEEN = 1.0


# Preempting schedulers leave 15 seconds or more. A step that makes no progress for this time is
# lost.
_SECONDS_HUNG = 8.0


# The sum encodes two numbers, exactly in float64 for up to 65,535 ranks.
_MOST_STEPS = 2**16


_ASKED = 2.0**32


class StopRequest:
    """Detects on all ranks together that one of them was asked to stop, as a context manager.

    In the block, SIGTERM does not end the process. It counts as a request, and the rank has a grace
    period (`hvd_estimators.launch.rank.graceful_stop`). Use it in the rank's main thread. In
    another thread, a rank receives no signals, and detects only the requests of other ranks.

    Parameters
    ----------
    sum_over_ranks : callable
        Sums one number per rank exactly, in 64 bits. All ranks call it, between two steps.
    ranks : int
        Number of ranks.

    Examples
    --------
    ::

        with StopRequest(sum_over_ranks, hvd.size()) as stop:
            for step in ...:
                ...
                optimizer.step()
                if stop.after_step():
                    save_checkpoint(...)
                    raise interrupted(epoch, step, saved=True)
    """

    def __init__(self, sum_over_ranks: Callable[[float], float], ranks: int) -> None:
        self._sum = sum_over_ranks
        self._ranks = ranks
        self._asked = False
        self._stack = contextlib.ExitStack()
        self._distance = self._left = 1
        self._agreed_at = time.monotonic()
        self._settled = threading.Event()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(ValueError):  # this is not the main thread
                before = signal.signal(signal.SIGTERM, self._take)
                stack.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)
                self._settled.clear()
                stack.enter_context(_ending_if_hung(self._settled))
                stack.enter_context(asking_for_grace())
            self._stack = stack.pop_all()
        self._agreed_at = time.monotonic()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def ask(self) -> None:
        """Ask all ranks to stop, like SIGTERM. Any thread of any rank may call it."""
        self._asked = True

    def after_step(self) -> bool:
        """Return whether to save a checkpoint and stop here. The result is the same on all ranks.

        All ranks must call it equally often: after each optimizer step, when a checkpoint can be
        written. At the end of an epoch, call it after the epoch's own checkpoint.
        """
        self._left -= 1
        return self._left <= 0 and self._agree()

    def _agree(self) -> bool:
        """Return whether any rank was asked to stop, and schedule the next check."""
        seconds = max(time.monotonic() - self._agreed_at, 1e-9)
        # A slow first step does not predict the next steps, and neither does a fast one.
        wanted = min(_SECONDS_BETWEEN / seconds, 2.0) * self._distance
        own = min(max(int(wanted), 1), _MOST_STEPS)
        asked, steps = divmod(self._sum(own + (_ASKED if self._asked else 0.0)), _ASKED)
        self._distance = self._left = max(int(steps) // self._ranks, 1)
        self._agreed_at = time.monotonic()
        if asked:
            self._settled.set()
            mute_if_unheard()
        return asked > 0

    def _take(self, number: int, frame: FrameType | None) -> Any:
        self._asked = True
        # The sender may have ended, together with the reader of this process's output.
        mute_if_unheard()


@contextlib.contextmanager
def _ending_if_hung(settled: threading.Event) -> Iterator[None]:
    """End this process if it makes no progress after SIGTERM, as in a call that never returns.

    Python calls its signal handlers between two bytecode instructions. If the main thread waits
    in a call of Horovod, no handler runs. In all cases Python writes the signal's number to a pipe,
    and a thread reads from that pipe.

    Parameters
    ----------
    settled : threading.Event
        Set when the ranks have agreed to stop. The actions after that, such as a checkpoint, may
        take longer.
    """
    main = threading.get_ident()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while numbers := os.read(reading, 512):
            if before != -1:
                with contextlib.suppress(OSError):
                    os.write(before, numbers)
            if signal.SIGTERM in numbers:
                break
        else:
            return
        asked_at = time.monotonic()
        deadline = asked_at + _SECONDS_HUNG
        while not settled.wait(max(deadline - time.monotonic(), 0)):
            now = time.monotonic()
            last = now - seconds_without_progress()
            if last <= asked_at:
                _end_by_sigterm(main)
            deadline = max(last + _SECONDS_HUNG, now + 0.5)

    thread = threading.Thread(target=watch, name="hvd_estimators SIGTERM", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        settled.set()
        os.close(writing)
        thread.join()
        os.close(reading)


def _end_by_sigterm(main: int) -> NoReturn:
    """End this process by SIGTERM, from a thread other than the main thread."""
    with contextlib.suppress(OSError, ValueError):  # There may be no reader.
        mute_if_unheard()
        print(
            f"Asked to end (SIGTERM), and no progress for {_SECONDS_HUNG:g} s. This process ends "
            f"in:\n{stack_of(main)}",
            file=sys.stderr,
            flush=True,
        )
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        # Python can set handlers only in the main thread.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
    os._exit(128 + signal.SIGTERM)


def interrupted(epoch: int, step: int, saved: bool) -> TrainingInterruptedError:
    """Return the error that ranks raise if they were asked to stop.

    Parameters
    ----------
    epoch : int
        The epoch, from 0.
    step : int
        Number of completed steps in the epoch; 0 if the previous epoch has just ended.
    saved : bool
        Whether there is a checkpoint of this position.
    """
    kept = (
        "A checkpoint of this position was written: fit() with the same run_id goes on from there."
        if saved
        else "The run keeps no checkpoints, so that nothing of it is left."
    )
    return TrainingInterruptedError(
        f"The ranks were asked to end (SIGTERM), and have stopped in epoch {epoch} after step "
        f"{step}. {kept}"
    )
