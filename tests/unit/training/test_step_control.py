"""Ranks agree on stop requests, on due checkpoints and on values that are not finite."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_clock import FakeClock, set_clock

from hvd_estimators.exceptions import (
    HvdEstimatorsError,
    NotFiniteError,
    TrainingInterruptedError,
)
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


def test_ranks_of_different_speed_exchange_equally_often(clock: FakeClock) -> None:
    """Ranks add their measurements; none decides alone."""
    ranks = Ranks(2)
    slow = ranks.stops[1]
    for _ in range(2000):
        clock.now += 0.01
        slow._agreed_at -= 0.03
        ranks.after_step()
    assert 20 < ranks.sums // 2 < 200


@pytest.mark.parametrize("others", [0, 1, 65534])
def test_two_numbers_share_a_sum_without_overflow(clock: FakeClock, others: int) -> None:
    """All ranks add the maximum number of steps; some others have a request."""
    most, number = step_control._MOST_STEPS, 65535
    sums: list[float] = []

    def add_up(own: float) -> float:
        sums.append(own)
        return own + (number - 1) * float(most) + others * step_control._ASKED

    stop = StopRequest(add_up, number)
    stop._distance = most
    assert stop.after_step() is (others > 0)
    assert sums == [most]
    assert stop._left == most


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


def test_other_threads_see_requests_but_ask_for_no_grace(directory: str) -> None:
    heard: list[Any] = []

    def work() -> None:
        with StopRequest(lambda own: own + 2.0**32, 2) as stop:
            heard.extend([graceful_stop.grace_asked(directory), stop.after_step()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [0.0, True]


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


@pytest.mark.forks
def test_output_without_a_reader_is_not_an_error(capfd: Any, directory: str) -> None:
    """Standard output and error of the process are pipes without a reader."""

    def child(act: Callable[[], None], closed: Sequence[int]) -> int:
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            for descriptor in (1, 2):
                reading, writing = os.pipe()
                os.dup2(writing, descriptor)
                os.close(writing)
                if descriptor in closed:
                    os.close(reading)
            sys.stdout, sys.stderr = (os.fdopen(d, "w", closefd=False) for d in (1, 2))
            act()
            os.write(1, b"out")
            os.write(2, b"err")
            os._exit(0 if os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev else 3)
        except BrokenPipeError:
            os._exit(7)
        finally:
            os._exit(9)

    def print_something() -> None:
        """Print before a stop request, and after it, when the reader has closed the pipe."""
        with graceful_stop.asking_for_grace():
            print("out", flush=True)
            sys.stderr.writelines(["e", "rr\n"])
            sys.stderr.flush()
            graceful_stop.mute_if_unheard()
            print("out", flush=True)

    assert child(lambda: None, [1, 2]) == 7
    assert child(print_something, [1, 2]) == 0
    assert child(graceful_stop.mute_if_unheard, [1, 2]) == 0
    assert child(graceful_stop.mute_if_unheard, []) == 3  # streams with a reader do not change


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


def test_several_steps_in_one_call_make_one_checkpoint() -> None:
    control, saved = make_control(every_n_steps=3), []
    for first in range(1, 13, 4):
        control.after_step(0, first, range(first, first + 4), lambda: saved.append(1) or True)
    assert len(saved) == 3


def test_a_stop_request_ends_training_after_a_checkpoint(clock: FakeClock) -> None:
    control = make_control(every_n_steps=None)
    control._stop.ask()
    control.after_step(2, 1, [1], lambda: False)  # gradients still accumulate
    with pytest.raises(TrainingInterruptedError, match=r"in epoch 2 after step 2\. A checkpoint"):
        control.after_step(2, 2, [2], lambda: True)


def test_a_stop_request_waits_for_the_end_of_an_unsavable_epoch(
    clock: FakeClock,
) -> None:
    control = make_control(every_n_steps=None)
    control._stop.ask()
    control.after_step(2, 1, [1], lambda: False)
    with pytest.raises(TrainingInterruptedError, match="in epoch 3 after step 0"):
        control.after_epoch(3)


def test_without_checkpoints_nothing_is_saved_before_a_stop(clock: FakeClock) -> None:
    control, saved = make_control(every_n_steps=1, has_checkpoints=False), []
    control.after_step(0, 1, [1], lambda: saved.append(1) or True)
    control._stop.ask()
    control.after_step(0, 2, [2], lambda: saved.append(1) or True)  # ranks agree in the next step
    with pytest.raises(TrainingInterruptedError, match="keeps no checkpoints"):
        control.after_step(0, 3, [3], lambda: saved.append(1) or True)
    assert not saved


NAN = float("nan")


class ThreadedRanks:
    """Ranks in threads that gather and sum their values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.brought: dict[int, Any] = {}
        self.gathered = 0
        self._barrier = threading.Barrier(size, timeout=30)

    def meet(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self._barrier.wait()
        values = [self.brought[r] for r in range(self.size)]
        self._barrier.wait()
        return values

    def after_step(self, found: list[tuple[float | None, list[str]]]) -> list[str | None]:
        """Return the errors of the ranks for given findings."""
        raised: list[str | None] = [None] * self.size

        def be(rank: int) -> None:
            def gather(value: Any, name: str) -> list[Any]:
                self.gathered += 1
                return self.meet(rank, value)

            exchange: Any = type("Exchange", (), {"gather": staticmethod(gather)})
            control = StepControl(
                make_spec(), self.size, lambda value, name: sum(self.meet(rank, value)), exchange
            )
            try:
                control.check_finite(37, 2, *found[rank])
            except NotFiniteError as error:
                raised[rank] = str(error)

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised


def test_all_ranks_end_with_the_same_message() -> None:
    ranks = ThreadedRanks(3)
    raised = ranks.after_step([(None, []), (NAN, ["w"]), (None, ["w"])])
    assert raised[0] is not None
    assert len(set(raised)) == 1
    assert "step 37 of the run (in epoch 2" in raised[0]
    assert "the loss of rank 1 is nan; NaN or infinite after it: 'w'. " in raised[0]
    assert issubclass(NotFiniteError, (HvdEstimatorsError, FloatingPointError))


def test_nothing_is_gathered_if_all_values_are_finite() -> None:
    ranks = ThreadedRanks(2)
    assert ranks.after_step([(None, []), (None, [])]) == [None, None]
    assert not ranks.gathered


def test_a_single_rank_exchanges_nothing_and_names_a_few() -> None:
    ranks = ThreadedRanks(1)
    names = [f"layer.{n}" for n in range(8)]
    (message,) = ranks.after_step([(None, names)])
    assert message is not None
    assert "'layer.4' and 3 others" in message
    assert "layer.5" not in message
    assert "the loss" not in message
    assert not ranks.brought


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
