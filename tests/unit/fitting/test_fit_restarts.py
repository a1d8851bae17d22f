"""Relaunches of a fit's ranks: when, and with how many ranks. No rank runs here."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators import Store
from hvd_estimators.exceptions import (
    JobCancelledError,
    SlotsError,
    StoreUnavailableError,
    UnreachableError,
    WorkerFailedError,
)
from hvd_estimators.fitting import restarts
from hvd_estimators.fitting.restarts import FitLaunches
from hvd_estimators.launch import relaunch
from hvd_estimators.launch.rank.hang_detection import STALL_VARIABLE
from hvd_estimators.store.checkpoints import CheckpointInfo, checkpoint_path, write_manifest
from hvd_estimators.store.paths import Position

pytestmark = pytest.mark.timeout(60)

STEPS, ROWS_OF_A_STEP = 10, 8


def lost(cause: str | None = "killed", error_type: str = "", is_transient: bool = False) -> Any:
    return WorkerFailedError(
        "Rank 1 failed",
        rank=1,
        host="far",
        cause=cause,
        error_type=error_type,
        is_transient=is_transient,
    )


class FakeBackend:
    """Backend whose launches fail as configured; the last returns its number of ranks."""

    def __init__(self, *ends: Any, slots: tuple[int | None, ...] = (None,), ranks: int = 2) -> None:
        self.ends = list(ends)
        self.slots = list(slots)
        self.launches: list[int] = []
        self.ranks = ranks

    def num_processes(self) -> int:
        return self.ranks

    def task_slots(self) -> int | None:
        return self.slots.pop(0) if len(self.slots) > 1 else self.slots[0]

    def resized(self, num_proc: int) -> Any:
        other = FakeBackend(ranks=num_proc)
        other.ends, other.slots, other.launches = self.ends, self.slots, self.launches
        return other

    def launch(self, backend: Any) -> list[Any]:
        self.launches.append(backend.num_processes())
        end = self.ends.pop(0) if self.ends else backend.num_processes()
        if callable(end):
            end = end()
        if isinstance(end, BaseException):
            raise end
        return [end]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record pauses instead of sleeping."""
    slept: list[float] = []
    monkeypatch.setattr(restarts, "time", SimpleNamespace(sleep=slept.append, monotonic=_clock()))
    monkeypatch.setattr(relaunch, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(relaunch, "_RETURN_SECONDS", 0.05)
    return slept


def _clock() -> Callable[[], float]:
    import time

    return time.monotonic


class Launches(FitLaunches):
    """Launches whose ranks are those of a `FakeBackend`."""

    def run_on(self, backend: Any) -> list[Any]:
        return list(backend.launch(backend))


class Fit:
    """Stub of a fit for `FitLaunches`, with the notes that it writes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        store = Store.create(str(folder / "store"))
        self.store, self.run_paths = store, store.run_paths("mine")
        self.notes: list[Any] = []
        data = SimpleNamespace(
            train_steps_per_epoch=STEPS, batches_before=lambda epoch, rows: rows // ROWS_OF_A_STEP
        )
        spec: Any = SimpleNamespace(store=store, run=self.run_paths, data=data, verbose=1)
        limit, least = options.get("max_restarts", 9), options.get("min_num_proc")
        self.run: Any = SimpleNamespace(lost=False, newest=None)
        transfer: Any = SimpleNamespace(put=lambda train: None)
        self.launches = Launches(self.run, transfer, print, lambda ranks: spec, spec, limit, least)

    def checkpoint(self, epoch: int, step: int = 0) -> None:
        path = checkpoint_path(self.run_paths, Position(epoch, step * ROWS_OF_A_STEP))
        info = CheckpointInfo(path, 0, "", epoch, step * ROWS_OF_A_STEP, "torch", {}, None, "min")
        write_manifest(self.store, info)

    def fit(self, backend: FakeBackend) -> list[Any]:
        given: Any = backend
        return self.launches.results(given, {}, print, self.notes.append)


@pytest.mark.parametrize(
    ("failure", "is_retried"),
    [
        *((lost(cause), True) for cause in ("killed", "stalled", "lost")),
        *((lost(cause), False) for cause in ("exited", None)),
        (lost("raised", "AnyError", is_transient=True), True),
        (lost("raised", "AnyError"), False),
    ],
)
def test_transient_failures_are_retried(
    tmp_path: Path, pauses: list[float], failure: Any, is_retried: bool
) -> None:
    backend = FakeBackend(failure)
    if is_retried:
        assert Fit(tmp_path).fit(backend) == [2]
    else:
        with pytest.raises(WorkerFailedError) as raised:
            Fit(tmp_path).fit(backend)
        assert raised.value is failure
    assert len(backend.launches) == 1 + is_retried


def test_lost_ranks_are_relaunched_and_the_checkpoint_is_logged(
    tmp_path: Path, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    fit = Fit(tmp_path, max_restarts=3)

    def trained() -> Any:
        fit.checkpoint(1, step=4)
        return lost("stalled")

    with caplog.at_level(logging.WARNING):
        assert fit.fit(FakeBackend(lost(), trained, lost("lost"))) == [2]

    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" resume ")[0] for line in lines] == [
        f"Run 'mine': Rank 1 on far {how}. 2 ranks are launched again (restart {number} of at most "
        "3) and"
        for number, how in enumerate(("was killed", "has stalled", "was lost"), 1)
    ]
    assert "from the beginning, because the run has no checkpoint yet" in lines[0]
    assert lines[1].endswith("from the checkpoint of epoch 2, step 4.")
    assert [note["cause"] for note in fit.notes] == ["killed", "stalled", "lost"]
    assert [(note["epoch"], note["step"]) for note in fit.notes] == [(0, 0), (1, 4), (1, 4)]
    # After a new checkpoint there is no pause, and the pauses start over.
    assert pauses == [1.0, 0.0, 1.0]


def test_pauses_grow_without_progress(tmp_path: Path, pauses: list[float]) -> None:
    leaving = lost("raised", "TrainingInterruptedError", is_transient=True)
    failures = [*[lost()] * 3, leaving, *[lost()] * 4]
    assert Fit(tmp_path).fit(FakeBackend(*failures)) == [2]
    # The fourth waits until the machine of its ranks is gone.
    assert pauses == [1.0, 2.0, 4.0, 10.0, 16.0, 32.0, 60.0, 60.0]


def test_pauses_after_notices_in_a_row_outlast_the_machine(
    tmp_path: Path, pauses: list[float]
) -> None:
    leaving = lost("raised", "TrainingInterruptedError", is_transient=True)
    fit = Fit(tmp_path)

    def noticed() -> Any:
        # The ranks take a step between two notices.
        fit.checkpoint(0, step=1 + len(pauses))
        return leaving

    assert fit.fit(FakeBackend(*[noticed] * 5, lost(), leaving)) == [2]
    assert pauses == [10.0, 20.0, 40.0, 60.0, 60.0, 1.0, 10.0]


def test_recurring_errors_end_the_fit_unchanged(tmp_path: Path, pauses: list[float]) -> None:
    first = lost("raised", "ValueError")
    for error in (first, JobCancelledError("cancelled"), SlotsError("few"), UnreachableError("")):
        with pytest.raises(type(error)) as caught:
            Fit(tmp_path).fit(FakeBackend(error))
        assert caught.value is error
    # Without restarts, nothing changes.
    killed = lost()
    with pytest.raises(WorkerFailedError) as unlimited:
        Fit(tmp_path, max_restarts=0).fit(FakeBackend(killed))
    assert unlimited.value is killed
    for limit, variables in ((0, {}), (9, {STALL_VARIABLE: "1800"})):
        fit = Fit(tmp_path, max_restarts=limit)
        assert fit.fit(FakeBackend()) == [2]
        assert fit.launches._env == variables
    assert pauses == []


def test_the_last_error_describes_earlier_failures(tmp_path: Path, pauses: list[float]) -> None:
    with pytest.raises(WorkerFailedError, match="Rank 1 on far was lost") as caught:
        Fit(tmp_path, max_restarts=1).fit(FakeBackend(lost("lost"), lost()))
    assert "launched again 1 times, and max_restarts=1 allows no more" in str(caught.value)
    assert (caught.value.relaunches, caught.value.cause) == (1, "killed")

    with pytest.raises(WorkerFailedError, match="of this kind comes back") as raised:
        Fit(tmp_path).fit(FakeBackend(lost(), lost("raised", "ValueError")))
    assert (raised.value.relaunches, raised.value.error_type) == (1, "ValueError")

    # Another process took over the run of a suspended driver.
    fit = Fit(tmp_path)
    fit.run.lost = True
    with pytest.raises(WorkerFailedError, match="another process trains this run"):
        fit.fit(FakeBackend(lost()))


def test_the_number_of_ranks_grows_again_with_the_slots(
    tmp_path: Path, pauses: list[float]
) -> None:
    fit = Fit(tmp_path, min_num_proc=2)
    backend = FakeBackend(lost("lost"), ranks=4)

    def free_all() -> Any:
        backend.slots[:] = [4]
        return lost("lost")

    backend.slots[:], backend.ends[1:] = [2], [free_all]
    assert fit.fit(backend) == [4]
    assert backend.launches == [4, 2, 4]
    assert [note["num_ranks"] for note in fit.notes] == [2, 4]


def test_too_few_slots_fail_after_a_timeout(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "0.05")
    with pytest.raises(SlotsError, match="Rank 1 on far was lost") as caught:
        Fit(tmp_path, min_num_proc=2).fit(FakeBackend(lost("lost"), slots=(1,), ranks=4))
    assert "2 task slots (min_num_proc)" in str(caught.value)
    with pytest.raises(SlotsError, match=r"the cluster has none.*restarted without recovery"):
        Fit(tmp_path, min_num_proc=2).fit(FakeBackend(lost("lost"), slots=(0,), ranks=4))
    assert isinstance(caught.value.__cause__, WorkerFailedError)
    # Slots that disappear between the count and the launch.
    backend = FakeBackend(lost(), *itertools.repeat(SlotsError("gone"), 3), slots=(2,))
    assert Fit(tmp_path).fit(backend) == [2]
    assert len(backend.launches) == 5


def test_relaunches_wait_for_an_unavailable_store(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [StoreUnavailableError("gone"), StoreUnavailableError("gone"), []]

    def positions(store: Any, run: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(restarts, "positions", positions)
    fit = Fit(tmp_path)
    assert fit.fit(FakeBackend(lost("raised", "StoreUnavailableError", is_transient=True))) == [2]
    assert answers == []
