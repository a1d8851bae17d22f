"""Interrupted drivers wait for ranks that save, and note how the fit ended."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_estimators.exceptions import JobCancelledError, StoreError, WorkerFailedError
from hvd_estimators.fitting import restarts
from hvd_estimators.fitting.record import end_record
from hvd_estimators.fitting.restarts import ending_by_sigterm
from hvd_estimators.fitting.run import Run
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank import graceful_stop
from hvd_estimators.launch.service.events import EventSender, RankMessage, receive_events
from hvd_estimators.launch.service.server import DriverService
from hvd_estimators.store import LocalStore
from hvd_estimators.store.checkpoints import CheckpointInfo, checkpoint_path, write_manifest
from hvd_estimators.store.paths import Position


@pytest.fixture(autouse=True)
def short_grace_period(monkeypatch: Any) -> None:
    monkeypatch.setattr(timeouts, "EVENT_DRAIN", 0.1)
    monkeypatch.setattr(graceful_stop, "_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(graceful_stop, "_UNTIL_ASKED_SECONDS", 0.0)


def interrupted(error: BaseException | None, seconds: float | None, save_after: float) -> bool:
    """End a job whose rank asks for some seconds; return if the rank saved in time."""
    saved = threading.Event()
    received: queue.Queue[Any] = queue.Queue()

    def save() -> None:
        saved.set()
        sender.close()

    timer = threading.Timer(save_after, save)
    try:
        with (
            contextlib.suppress(BaseException),
            DriverService("127.0.0.1") as service,
            receive_events(service, received.put),
        ):
            sender = EventSender(service.address)
            if seconds is not None:
                sender.ask_to_wait(seconds)
            sender.send(RankMessage(0, "asked"))
            received.get(timeout=10)
            timer.start()
            if error is not None:
                raise error
        return saved.is_set()
    finally:
        timer.cancel()
        sender.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), WorkerFailedError("no")])
def test_an_interrupted_driver_waits_for_ranks_that_ask(caplog: Any, error: Any) -> None:
    assert interrupted(error, seconds=600.0, save_after=0.3)
    assert "Waiting until the ranks have saved their state (at most 600 s)" in caplog.text
    assert "not ended in time" not in caplog.text


def test_the_driver_waits_no_longer_than_ranks_ask(caplog: Any) -> None:
    assert not interrupted(KeyboardInterrupt(), seconds=None, save_after=60.0)
    # A successful job has nothing to save.
    assert not interrupted(None, seconds=600.0, save_after=60.0)
    assert caplog.text == ""
    assert not interrupted(KeyboardInterrupt(), seconds=0.2, save_after=60.0)
    assert "not ended in time" in caplog.text


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(143), "interrupted"),
        (JobCancelledError("by its group"), "interrupted"),
        (WorkerFailedError("told to end", error_type="TrainingInterruptedError"), "interrupted"),
        (WorkerFailedError("no", error_type="ValueError"), "failed"),
        (WorkerFailedError("gone", host="node7", cause="lost"), "failed"),
        (StoreError("no"), "failed"),
        (None, "finished"),
    ],
)
def test_run_states_distinguish_interrupts_from_failures(
    tmp_path: Path, error: BaseException | None, state: str
) -> None:
    document = end_record({"fits": [{"state": "running"}]}, error, LocalStore(str(tmp_path)))
    assert document["state"] == document["fits"][0]["state"] == state
    assert ("error" in document) == (error is not None)
    if isinstance(error, WorkerFailedError):
        told = ("cause", "rank", "host", "error_type")
        expected = [error.cause, error.rank, error.host, error.error_type or None]
        assert [document["fits"][0]["error"][name] for name in told] == expected


def test_sigterm_raises_system_exit_in_the_block_only() -> None:
    cleaned = []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    @ending_by_sigterm()
    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            # A second SIGTERM ends the process at once.
            cleaned.append(signal.getsignal(signal.SIGTERM))

    with pytest.raises(SystemExit) as raised:
        work()
    assert raised.value.code == 143
    assert cleaned == [signal.SIG_DFL]
    with ending_by_sigterm(), ending_by_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.forks
def test_the_signal_ends_a_process_that_hangs_in_cleanup(monkeypatch: Any) -> None:
    monkeypatch.setattr(restarts, "_EXIT_SECONDS", 0.2)
    pid = os.fork()
    if not pid:
        try:
            with ending_by_sigterm():
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                finally:
                    time.sleep(60)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_existing_handlers_and_other_threads_are_left_alone() -> None:
    def own(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with ending_by_sigterm():
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)

    found = []

    def work() -> None:
        with ending_by_sigterm():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.mark.parametrize("is_lost", [False, True])
def test_partial_checkpoints_are_deleted_unless_the_lease_is_lost(
    tmp_path: Path, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(tmp_path))
    run = store.run_paths("mine")
    whole, unpointed = (checkpoint_path(run, Position(epoch)) for epoch in (1, 2))
    partial = f"{run.checkpoints_path}/.checkpoint-000001-48.ckpt-{'0f' * 16}"
    for path in (whole, unpointed, partial, f"{run.checkpoints_path}/of the user"):
        store.write_text(path, "content")
    write_manifest(store, CheckpointInfo(whole, 7, "", 1, 0, "torch"))
    before = store.names(run.checkpoints_path)

    monkeypatch.setattr(Run, "lost", is_lost)

    @Run(store, run).without_orphans()
    def work(error: BaseException | None) -> None:
        if error is not None:
            raise error

    work(None)
    assert store.names(run.checkpoints_path) == before
    with pytest.raises(KeyboardInterrupt):
        work(KeyboardInterrupt())
    gone = set(before) - set(store.names(run.checkpoints_path))
    assert gone == (set() if is_lost else {Path(unpointed).name, Path(partial).name})
