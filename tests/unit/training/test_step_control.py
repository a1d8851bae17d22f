"""Ranks agree on stop requests, on due checkpoints and on values that are not finite."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_clock import FakeClock, set_clock

from hvd_estimators.exceptions import HvdEstimatorsError, StoreError, TrainingInterruptedError
from hvd_estimators.launch.rank import graceful_stop
from hvd_estimators.training import step_control
from hvd_estimators.training.spec import CheckpointOptions, TrainSpec
from hvd_estimators.training.step_control import StepControl, StopRequest, interrupted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return set_clock(monkeypatch, step_control)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: Any) -> str:
    """Set the directory of a rank of a launch."""
    monkeypatch.setenv(graceful_stop.DIRECTORY_VARIABLE, str(tmp_path))
    return str(tmp_path)


class Ranks:
    """Ranks in one thread, which take each step one after the other.

    A first pass over the ranks collects the terms of a sum; a second pass uses the sum.
    """

    def __init__(self, number: int) -> None:
        self._own: list[float] = []
        self._known: float | None = None
        self.sums = 0
        self.stops = [StopRequest(self._sum, number) for _ in range(number)]

    def _sum(self, value: float) -> float:
        self.sums += 1
        self._own.append(value)
        return value if self._known is None else self._known

    def after_step(self) -> list[bool]:
        """Return the result of each rank."""
        before = [dict(vars(stop)) for stop in self.stops]
        self._own, self._known = [], None
        for stop in self.stops:
            stop.after_step()
        assert len(self._own) in (0, len(self.stops))  # all of them exchange, or none does
        self._known = sum(self._own)
        self.sums -= len(self._own)
        for stop, state in zip(self.stops, before, strict=True):
            vars(stop).update(state)
        return [stop.after_step() for stop in self.stops]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("who", [0, -1])
def test_all_ranks_see_a_request_at_the_same_step(clock: FakeClock, number: int, who: int) -> None:
    ranks = Ranks(number)
    for step in range(40):
        clock.now += 0.1
        assert ranks.after_step() == [False] * number, step

    ranks.stops[who].ask()
    heard: list[list[bool]] = []
    while not heard or not any(heard[-1]):
        clock.now += 0.1
        heard.append(ranks.after_step())

    assert heard[-1] == [True] * number
    assert len(heard) <= 11  # about one second of steps of 0.1 s


@pytest.mark.parametrize(("seconds", "looks"), [(0.001, 110), (0.1, 103), (3.0, 34)])
def test_ranks_exchange_about_once_a_second(clock: FakeClock, seconds: float, looks: int) -> None:
    """Run 100 s of steps; ranks exchange after each step longer than a second."""
    ranks = Ranks(2)
    for step in range(int(100 / seconds)):
        # The first step is slow, as with the compilation of a graph.
        clock.now += 10.0 if step == 0 else seconds
        ranks.after_step()

    assert ranks.sums // 2 == pytest.approx(looks, abs=12)


def test_sigterm_is_a_request_only_within_the_block(directory: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(graceful_stop.GRACE_VARIABLE, "4.5")
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(lambda own: own, 1) as stop:
        assert graceful_stop.grace_asked(directory) == 4.5
        assert not stop.after_step()
        os.kill(os.getpid(), signal.SIGTERM)
        assert any(stop.after_step() for _ in range(2**17))
    assert signal.getsignal(signal.SIGTERM) is before
    assert graceful_stop.grace_asked(directory) == 0.0
    assert os.listdir(directory) == []


@pytest.mark.forks
def test_sigterm_ends_forked_children(directory: str) -> None:
    def end_child() -> int:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, b"1")  # the child is ready for signals
            time.sleep(300)
            os._exit(0)
        assert os.read(reading, 1) == b"1"
        os.close(reading)
        os.close(writing)
        os.kill(child, signal.SIGTERM)
        killer = threading.Timer(30, os.kill, (child, signal.SIGKILL))
        killer.start()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        killer.cancel()
        return status

    with StopRequest(lambda own: own, 1) as stop:
        # Lightning's callback sets a handler that it has read.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        assert end_child() == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        assert any(stop.after_step() for _ in range(2**17))
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    try:
        assert end_child() == 7  # a handler of the user
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("env", "seconds"),
    [({}, 15.0), ("0", 0.0), ("60", 60.0), ("-1", 15.0), ("soon", 15.0), ("inf", 15.0)],
)
def test_grace_seconds_come_from_the_environment(env: Any, seconds: float) -> None:
    found = env if isinstance(env, dict) else {graceful_stop.GRACE_VARIABLE: env}
    assert graceful_stop.grace_seconds(found) == seconds


def test_grace_can_be_cancelled_and_must_be_requested(directory: str) -> None:
    assert graceful_stop.grace_asked(directory) == 0.0
    with graceful_stop.asking_for_grace():
        assert graceful_stop.grace_asked(directory) == 15.0
        graceful_stop.cancel_grace(directory)
        assert graceful_stop.grace_asked(directory) == 0.0
    assert graceful_stop.grace_asked(f"{directory}/that/has/gone") == 0.0


@pytest.mark.parametrize(
    ("saved", "says"), [(True, "same run_id resumes"), (False, "no state of it is saved")]
)
def test_the_error_names_the_position_and_the_saved_state(saved: bool, says: str) -> None:
    error = interrupted(3, 17, saved)
    assert isinstance(error, HvdEstimatorsError)
    assert "epoch 3 after step 17" in str(error)
    assert says in str(error)


def make_spec(every_n_steps: int | None = None, *, has_checkpoints: bool = True) -> Any:
    return SimpleNamespace(
        checkpoints=CheckpointOptions("torch", every_n_steps=every_n_steps),
        preemption_check=None,
        run=SimpleNamespace(checkpoints_path="checkpoints" if has_checkpoints else None),
    )


def make_control(every_n_steps: int | None, *, has_checkpoints: bool = True) -> StepControl:
    """Return the step control of a single rank."""
    spec = make_spec(every_n_steps, has_checkpoints=has_checkpoints)
    exchange: Any = None
    return StepControl(spec, 1, lambda value, name: value, exchange)


def test_a_due_checkpoint_waits_until_the_run_can_be_saved() -> None:
    control, saved = make_control(every_n_steps=3), []
    for step in range(1, 10):

        def save(step: int = step) -> bool:
            saved.append(step)
            return step not in (3, 4)

        control.after_step(0, step, [step], save)
    assert saved == [3, 4, 5, 6, 9]


def test_a_stop_request_ends_training_after_a_checkpoint(clock: FakeClock) -> None:
    control = make_control(every_n_steps=None)
    control._stop.ask()
    control.after_step(2, 1, [1], lambda: False)  # gradients still accumulate
    with pytest.raises(TrainingInterruptedError, match=r"in epoch 2 after step 2\. A checkpoint"):
        control.after_step(2, 2, [2], lambda: True)


def test_a_stop_request_waits_for_the_end_of_an_unsavable_epoch(clock: FakeClock) -> None:
    control = make_control(every_n_steps=None)
    control._stop.ask()
    control.after_step(2, 1, [1], lambda: False)
    with pytest.raises(TrainingInterruptedError, match="in epoch 3 after step 0"):
        control.after_epoch(3)


@pytest.mark.parametrize("error", [None, interrupted(0, 1, saved=True), StoreError("full")])
def test_ranks_that_stop_on_request_meet_once_more(error: Exception | None) -> None:
    sums: list[str] = []

    def add(value: float, name: str) -> float:
        sums.append(name)
        return value

    exchange: Any = None
    control = StepControl(make_spec(), 1, add, exchange)
    with contextlib.suppress(HvdEstimatorsError), control:
        if error is not None:
            raise error
    assert sums == (["stopped"] if isinstance(error, TrainingInterruptedError) else [])


def test_without_checkpoints_nothing_is_saved_before_a_stop(clock: FakeClock) -> None:
    control, saved = make_control(every_n_steps=1, has_checkpoints=False), []
    control.after_step(0, 1, [1], lambda: saved.append(1) or True)
    control._stop.ask()
    control.after_step(0, 2, [2], lambda: saved.append(1) or True)  # ranks agree in the next step
    with pytest.raises(TrainingInterruptedError, match="keeps no checkpoints"):
        control.after_step(0, 3, [3], lambda: saved.append(1) or True)
    assert not saved


@dataclass
class Data:
    train_steps_per_epoch: int


def test_steps_are_counted_over_the_run() -> None:
    spec = object.__new__(TrainSpec)
    spec.__dict__.update(data=Data(7), backward_passes_per_step=3)
    # Three steps per epoch, the last with one batch.
    done = [(epoch, b) for epoch in (0, 1, 2) for b in (3, 6, 7)]
    assert [spec.steps_done(*at) for at in done] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert spec.steps_done(1, 0) == spec.steps_done(0, 7)
    due = CheckpointOptions("torch", every_n_steps=4)
    assert [at for at in done if due.due_after(spec.steps_done(*at))] == [(1, 3), (2, 6)]
    assert not any(CheckpointOptions("torch").due_after(step) for step in range(1, 9))
