"""Stop requests: ranks agree on a step, checkpoint there, and stop together.

While ranks validate, they agree on nothing: each takes as many batches as it has. Who asks them to
end, or kills one, would take all steps since the last checkpoint along. Runs in the ranks; imports
no framework.

Whoever wants a rank to end sends SIGTERM: its guardian once its task or the driver has gone, the
scheduler of a cluster that takes a machine back. Ranks of one job hear of it at different times, or
only one of them does, and must not stop at different steps: the others would wait for them for
ever. Therefore they add up about once a second who has been asked. Between two such sums nothing is
done but counting down. Runs in the ranks; imports no framework.
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
from hvd_estimators.training.spec import CheckpointOptions, TrainSpec

__all__ = [
    "LongValidation",
    "StopRequest",
    "interrupted",
    "stopped_before",
    "without_further_epochs",
]


class LongValidation:
    """Tells whether to save the run before an epoch's last step, as validation comes after it.

    That is where the validation before took longer than `CheckpointOptions.long_validation`. An
    epoch's last step itself is not one to save after: the next thing that is saved is its end.

    Parameters
    ----------
    options : CheckpointOptions
        What is long.
    ranks : int
        How many there are.
    sum_over_ranks : callable
        Adds up a number of each rank. Called by all ranks, in `measure` and `agree`.
    """

    def __init__(
        self, options: CheckpointOptions, ranks: int, sum_over_ranks: Callable[[float], float]
    ) -> None:
        self._limit = options.long_validation
        self._ranks = ranks
        self._sum = sum_over_ranks
        self._is_long = False
        self._begun: float | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Take the time of a validation. Called by all ranks."""
        self.begin()
        yield
        self.agree()

    def begin(self) -> None:
        """Note that validation begins."""
        self._begun = time.monotonic()

    def agree(self) -> None:
        """Settle, now that a validation has ended, whether it was a long one. By all ranks."""
        took = 0.0 if self._begun is None else time.monotonic() - self._begun
        self._begun = None
        self._is_long = self._sum(took) / self._ranks > self._limit

    def is_due(self, steps_left: int, steps: int = 1) -> bool:
        """Return whether to save now. The same on all ranks.

        Parameters
        ----------
        steps_left : int
            Steps of the optimizer that are left of the epoch.
        steps : int
            How many are taken before it is asked again.
        """
        return self._is_long and 0 < steps_left <= steps


S = TypeVar("S", bound=TrainSpec)


def without_further_epochs(spec: S, state: RunState | None) -> S:
    """Return a job without further epochs, if its run has been stopped and is not to go on.

    Runs on every rank, after the run's newest checkpoint has been restored.

    Parameters
    ----------
    spec : TrainSpec
        The job.
    state : RunState or None
        What was restored.
    """
    if state is None or not stopped_before(spec, state):
        return spec
    return replace(spec, epochs=min(spec.epochs, state.epoch))


def stopped_before(spec: TrainSpec, state: RunState | None) -> bool:
    """Return whether a run has been stopped, and is to stay so."""
    return state is not None and state.stopped and not spec.resume_stopped


logger = logging.getLogger(__name__)


_SECONDS_BETWEEN = 1.0


# Schedulers that preempt leave 15 seconds or more; a step with no progress for so long is lost.
_SECONDS_HUNG = 8.0


# Two numbers in one sum, which float64 holds exactly for 65,535 ranks.
_MOST_STEPS = 2**16


_ASKED = 2.0**32


class StopRequest:
    """Tells all ranks together when one of them is asked to end, as a context manager.

    In the block SIGTERM ends the process no more, but is taken as a request, for which a rank of
    ours has some seconds (`hvd_estimators.launch.rank.graceful_stop`). To be used in the rank's
    main thread; elsewhere a rank gets no signals, and only hears of the others.

    Parameters
    ----------
    sum_over_ranks : callable
        Adds up a number of each rank exactly, in 64 bits. Called by all ranks, between two steps.
    ranks : int
        How many there are.

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
        """Ask all ranks to end, as SIGTERM does; from any thread of any of them."""
        self._asked = True

    def after_step(self) -> bool:
        """Return whether to save a checkpoint of this position and end. The same on all ranks.

        Called by all ranks equally often: after each step of the optimizer, where a checkpoint can
        be written. At the end of an epoch that is after the epoch's own checkpoint.
        """
        self._left -= 1
        return self._left <= 0 and self._agree()

    def _agree(self) -> bool:
        """Return whether any rank has been asked, and settle when to look again."""
        seconds = max(time.monotonic() - self._agreed_at, 1e-9)
        # A first step that is slow says little of the next ones, and so does one that is fast.
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
        # Who asks may be gone, and with them who read what is printed.
        mute_if_unheard()


@contextlib.contextmanager
def _ending_if_hung(settled: threading.Event) -> Iterator[None]:
    """End this process if it gets SIGTERM and makes no progress, as in a call that never returns.

    Python calls its signal handlers between two of its own instructions. A main thread that waits
    in a call of Horovod gets to none. Whatever it does, Python writes the signal's number to a
    pipe, from which a thread reads.

    Parameters
    ----------
    settled : threading.Event
        Set when the ranks have agreed to end: what follows, such as a checkpoint, may take longer.
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
    """End this process as SIGTERM does, from another thread than the main one."""
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

        # Python sets handlers in the main thread only.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
    os._exit(128 + signal.SIGTERM)


def interrupted(epoch: int, step: int, saved: bool) -> TrainingInterruptedError:
    """Return the error with which ranks end that were asked to.

    Parameters
    ----------
    epoch : int
        The epoch, from 0.
    step : int
        Steps of it that are done; 0 where the epoch before has just ended.
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
