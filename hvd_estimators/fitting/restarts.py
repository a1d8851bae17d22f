"""Launches and restarts of a fit's ranks. Runs on the driver.

What a launch finds of its run is a matter of the ranks: they go on from its newest checkpoint. Here
it is decided whether there is another launch, when, and with how many ranks.
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
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import (
    SlotsError,
    StoreUnavailableError,
    UnreachableError,
    WorkerFailedError,
)
from hvd_estimators.fitting.record import now
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.rank.hang_detection import HANG_VARIABLE, PATIENCE_VARIABLE
from hvd_estimators.launch.relaunch import for_good, slots_again, summary
from hvd_estimators.launch.service.events import Event, Handler, RankEpoch, RankProgress
from hvd_estimators.launch.validation import seconds_given
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.checkpoints import checkpoint_path, positions
from hvd_estimators.store.leases import FencingToken
from hvd_estimators.store.paths import Position, manifest_of, orphans
from hvd_estimators.training.call_transfer import Handover, StoredCall, Trainer, train_stored
from hvd_estimators.training.spec import TrainSpec

if TYPE_CHECKING:
    from hvd_estimators.store import Store

__all__ = [
    "Launch",
    "ProgressAcrossLaunches",
    "Restarts",
    "comes_back",
    "ending_by_sigterm",
    "warming_up",
    "without_leftovers",
]


@dataclass
class Launch:
    """Launches the ranks of a fit; called with a backend, once or several times.

    Attributes
    ----------
    handover : Handover
        Holds what they are told.
    train : callable
        What every rank calls.
    spec_for : callable
        Returns what ranks are told, given how many of them there are.
    spec : TrainSpec
        What the ranks of the current launch are told.
    call : StoredCall
        The same, where they read it.
    env : mapping
        Their environment variables.
    handler : callable
        Gets what they report.
    fence : callable
        Returns what keeps ranks of earlier launches from the run, given the launch's number.
    number : int
        How many launches there have been.
    """

    handover: Handover
    train: Trainer
    spec_for: Callable[[int], TrainSpec]
    spec: TrainSpec
    call: StoredCall
    env: Mapping[str, str | None]
    handler: Handler
    fence: Callable[[int], FencingToken | None] = lambda launch: None
    number: int = 0

    def __call__(self, backend: Backend) -> list[Any]:
        """Return what the ranks return."""
        num_ranks = backend.num_processes()
        if num_ranks != self.spec.data.num_ranks:
            self.spec = self.spec_for(num_ranks)
            self.call = self.handover.put(self.train, self.spec)
        call = replace(self.call, fence=self.fence(self.number))
        self.number += 1
        return backend.run(
            train_stored,
            args=(call,),
            kwargs={},
            env=dict(self.env),
            on_event=self.handler,
        )


def warming_up(
    backend: Backend, train: Trainer, store: Store, env: Mapping[str, str | None]
) -> contextlib.AbstractContextManager[None]:
    """Let machines import the framework, in the block, that the ranks of a fit will need."""
    call = StoredCall(store, "", "", "", getattr(train, "__module__", ""))
    return backend.warming_up(train_stored, (call,), env)


class ProgressAcrossLaunches:
    """Follows what ranks tell, and keeps from others what they have been told before.

    Ranks that were launched again train anew what came after the checkpoint that they go on from.

    Attributes
    ----------
    place : (int, int) or None
        Epoch, from 0, and steps of it, as the ranks of the current launch told them last; None
        before they did.
    """

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        self._told: set[tuple[str, int]] = set()
        self._told_before: set[tuple[str, int]] = set()

    def restart(self) -> None:
        """Take note that ranks are launched again."""
        self.place = None
        self._told_before = set(self._told)

    def handler(self, handler: Handler) -> Handler:
        """Return what handles events, and hands on to another handler what is new to it."""

        def handle(event: Event) -> None:
            if self._is_new(event):
                handler(event)

        return handle

    def _is_new(self, event: Event) -> bool:
        if isinstance(event, RankEpoch):
            self._add(event.kind, event.epoch, (event.epoch + 1, 0))
        elif isinstance(event, RankProgress):
            if event.done:
                self._add(event.kind, event.epoch, (event.epoch + 1, 0))
            else:
                self.place = max(self.place or (0, 0), (event.epoch, event.step))
        else:
            return True
        return (event.kind, event.epoch) not in self._told_before

    def _add(self, kind: str, epoch: int, place: tuple[int, int]) -> None:
        self._told.add((kind, epoch))
        self.place = max(self.place or (0, 0), place)


# Longer than ranks are waited for.
_SECONDS = 60.0


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the block, and then the program, by `SystemExit`. Runs on the driver.

    By itself the signal ends a process on the spot, and nobody notes what became of the run. The
    exit status is what a shell tells of such an end, 143. Does nothing where the program handles
    the signal itself, and in threads that get no signals. Not for blocks that wait for Spark: a
    call to the JVM that is interrupted blocks the next one. Should that happen all the same, the
    signal ends the process a minute later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    late = threading.Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    late.daemon = True

    def end(number: int, frame: FrameType | None) -> None:
        # Once: who sends another one does not want to wait.
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


@contextlib.contextmanager
def without_leftovers(store: Store, run: RunPaths, is_lost: Callable[[], bool]) -> Iterator[None]:
    """Delete what ranks have left of checkpoints, when the block ends by an error or interrupt.

    Parameters
    ----------
    store : Store
        Keeps the run.
    run : RunPaths
        The run, which is this fit's.
    is_lost : callable
        Returns whether somebody else trains it by now.
    """
    try:
        yield
    except BaseException:
        directory = run.checkpoints_path
        if directory is not None and not is_lost():
            try:
                for name in orphans(run.checkpoint_filename, store.names(directory)):
                    store.delete(f"{directory}/{name}")
            except OSError as error:
                logger.warning("What ranks have left could not be deleted: %s", error)
        raise


# Half an hour, see `hvd_estimators.launch.rank.hang_detection`.
_STALL_SECONDS = 1800


_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


# An executor that is about to go still counts among the task slots.
_LEAVING_PAUSE = 10.0


# What ranks raise for reasons that lie outside of them: a peer that is gone, a machine that is
# about to go, a store that does not answer, a process that read for them and was killed.
_LEAVING = "TrainingInterruptedError"


_PASSING = {"HorovodInternalError", "ReaderError", "StoreUnavailableError", _LEAVING}


# Horovod says so of calls that do not fit each other.
_MISTAKES = re.compile(r"Mismatched|Duplicate tensor name|must have the same|Invalid")


def comes_back(error: WorkerFailedError) -> bool:
    """Return whether ranks that are launched again would fail in the same way.

    They would where a rank raised an exception, other than for the loss of another one, a store
    that did not answer, or because it was told to end; where it ended itself; and where Spark
    failed for an unknown reason.
    """
    if error.cause == "raised":
        told = error.error_type in _PASSING
        return not told or (
            error.error_type == "HorovodInternalError" and bool(_MISTAKES.search(str(error)))
        )
    return error.cause not in ("killed", "stalled", "lost")


@dataclass
class Restarts:
    """The launches of one fit.

    Attributes
    ----------
    spec : TrainSpec
        What the ranks of the first launch are told.
    limit : int
        Most restarts.
    least : int or None
        Fewest ranks; None for as many as in the first launch.
    is_lost : callable
        Returns whether somebody else trains the run by now.
    note : callable
        Called with what is noted of each restart.
    newest : Position or None
        The checkpoint that the first launch goes on from.
    reached : ProgressAcrossLaunches
        How far the ranks have come.
    failures : list of WorkerFailedError
        What was lost.
    """

    spec: TrainSpec
    limit: int
    least: int | None
    is_lost: Callable[[], bool]
    note: Callable[[Mapping[str, Any]], None]
    newest: Position | None = None
    reached: ProgressAcrossLaunches = field(default_factory=ProgressAcrossLaunches)
    failures: list[WorkerFailedError] = field(default_factory=list)
    _deadline: float = math.inf

    def run(self, backend: Backend, launch: Callable[[Backend], list[Any]]) -> list[Any]:
        """Launch ranks until they return, and return what they do.

        Parameters
        ----------
        backend : Backend
            Runs the ranks of the first launch, and those of others if there are slots for them.
        launch : callable
            Launches ranks by a backend.

        Raises
        ------
        WorkerFailedError
            If a rank failed in a way that comes back, or once too often.
        SlotsError
            If there were too few task slots for too long.
        JobCancelledError
            If the thread's Spark jobs were cancelled, also while none of them ran.
        """
        current, before, pauses = backend, self.newest, _pauses()
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
                with _waiting(backend) as wait:
                    wait(pause)
                    current = self._for_slots(backend, current, wait)
                self._tell(lost, position, current.num_processes())
            except (SlotsError, UnreachableError) as error:
                # Slots that were there a moment ago may have gone.
                if not self.failures:
                    raise
                if time.monotonic() > self._deadline:
                    raise self._too_few(current, str(error)) from self.failures[-1]
                with _waiting(backend) as wait:
                    wait(_FIRST_PAUSE)
                    current = self._for_slots(backend, current, wait)

    def environment(self) -> dict[str, str]:
        """Return environment variables of the ranks, so that those that hang are noticed."""
        given = os.environ.get(HANG_VARIABLE)
        return {
            **({PATIENCE_VARIABLE: str(_STALL_SECONDS)} if self.limit else {}),
            **({} if given is None else {HANG_VARIABLE: given}),
        }

    def _add(self, error: WorkerFailedError) -> None:
        """Note a launch that failed; raise its error if it was the last one."""
        if not self.limit or (comes_back(error) and not self.failures):
            raise error
        why = ""
        if comes_back(error):
            why = "; a failure of this kind comes back"
        elif len(self.failures) >= self.limit:
            why = f", and max_restarts={self.limit} allows no more"
        elif self.is_lost():
            why = ", and another process trains this run by now"
        if why:
            raise for_good(error, self.failures, why) from error
        self.failures.append(error)
        self._deadline = time.monotonic() + seconds_given(None, "HOROVOD_ELASTIC_TIMEOUT")

    def _newest(self) -> Position | None:
        """Return the newest checkpoint, once the store answers."""
        while True:
            try:
                return max(positions(self.spec.store, self.spec.run), default=None)
            except StoreUnavailableError as error:
                if time.monotonic() > self._deadline:
                    raise error from self.failures[-1]
                time.sleep(_FIRST_PAUSE)

    def _lost(self, position: Position | None, launched: float) -> dict[str, Any]:
        """Return what was lost: seconds since the checkpoint, and steps as far as they are known.

        Parameters
        ----------
        position : Position or None
            The checkpoint that is gone on from.
        launched : float
            For how many seconds the launch has lasted.
        """
        spec = self.spec
        lost: dict[str, Any] = {"seconds": launched, "epoch": 0, "step": 0, "steps": None}
        if position is not None:
            lost["epoch"] = position.epoch
            lost["step"] = spec.data.batches_before(position.epoch, position.rows)
            written = None
            with contextlib.suppress(OSError):  # the ranks will see whether the store is there
                written = spec.store.modified(manifest_of(checkpoint_path(spec.run, position)))
            if written is not None:
                moment = datetime.datetime.now(datetime.timezone.utc)
                lost["seconds"] = min(launched, max((moment - written).total_seconds(), 0.0))
        place = self.reached.place
        self.reached.restart()
        if place is not None and spec.verbose > 0:  # otherwise ranks tell of epochs only
            each = spec.data.train_steps_per_epoch
            steps = (place[0] - lost["epoch"]) * each + place[1] - lost["step"]
            lost["steps"] = max(steps, 0)
        return lost

    def _for_slots(
        self, backend: Backend, before: Backend, wait: Callable[[float], None]
    ) -> Backend:
        """Return what runs as many ranks as there are slots for, once there are enough."""
        most = backend.num_processes()
        least = most if self.least is None else self.least
        if least < most and backend.resized(least) is None:
            least = most
        slots = backend.task_slots()
        if slots is None:
            return backend

        def count() -> int:
            wait(0)
            return backend.task_slots() or 0

        slots = slots_again(count, least, before.num_processes(), self._deadline)
        if slots >= most:
            return backend
        resized = backend.resized(slots) if slots >= least else None
        if resized is None:
            raise self._too_few(backend, f"the cluster has {slots}") from self.failures[-1]
        return resized

    def _tell(self, lost: Mapping[str, Any], position: Position | None, num_ranks: int) -> None:
        """Say in a line what was lost, and note it."""
        error, number = self.failures[-1], len(self.failures)
        spec = self.spec
        if position is not None:
            source = f"from the checkpoint of epoch {lost['epoch'] + 1}, step {lost['step']}"
        elif spec.run.checkpoints_path is None:
            source = "from the beginning of this fit, as the store keeps no checkpoints"
        else:
            source = "from the beginning, as there is no checkpoint yet"
        steps = "" if lost["steps"] is None else f"{lost['steps']} steps and "
        logger.warning(
            "Run %r: %s %d ranks are launched again (restart %d of at most %d) and go on %s: "
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

    def _too_few(self, backend: Backend, found: str) -> SlotsError:
        least = backend.num_processes() if self.least is None else self.least
        return SlotsError(
            f"{summary(self.failures[-1])} To launch the ranks again, {least} task slots "
            "(min_num_proc) were waited for in vain, until HOROVOD_ELASTIC_TIMEOUT (600 s by "
            f"default): {found}. They had been launched again {len(self.failures) - 1} times."
        )


def _waiting(backend: Backend) -> contextlib.AbstractContextManager[Callable[[float], None]]:
    """Return how to wait until a backend is to launch ranks again."""
    waiting = getattr(backend, "waiting", None)
    return contextlib.nullcontext(time.sleep) if waiting is None else waiting()


def _pauses(*first: float) -> Iterator[float]:
    """Yield the seconds before restarts between which there is no new checkpoint."""
    yield from first
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
