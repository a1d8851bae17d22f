"""Notices before a machine goes: the polled check of a rank, and the process's SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hvd_estimators
from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank.preemption import watching
from hvd_estimators.launch.rank.worker import call_without_notifications


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "PREEMPTION_POLL", 0.01)


@pytest.mark.usefixtures("fast")
def test_the_first_notice_counts_and_errors_of_the_check_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = iter([False, OSError("busy"), OSError("busy"), 0, "yes"])
    noticed, calls = threading.Event(), []

    def check() -> Any:
        answer = next(answers)
        calls.append(answer)
        if isinstance(answer, OSError):
            raise answer
        return answer

    with watching(check, noticed.set):
        assert noticed.wait(30)
    assert len(calls) == 5
    printed = capsys.readouterr().err
    assert printed.count("OSError: busy") == 1
    assert printed.endswith("preemption_check: this machine is about to go.\n")


@pytest.mark.usefixtures("fast")
def test_the_end_of_the_block_ends_the_polling() -> None:
    called = threading.Event()

    def check() -> bool:
        called.set()
        return False

    before = set(threading.enumerate())
    with watching(check, lambda: None):
        assert called.wait(30)
        (thread,) = set(threading.enumerate()) - before
    thread.join(30)
    assert not thread.is_alive()
    with watching(None, lambda: None):
        assert set(threading.enumerate()) <= before


def test_a_function_of_run_gets_sigterm(tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def save_on_sigterm() -> str:
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        ready.touch()
        # Python runs the handler between two instructions of the main thread. A signal that comes
        # just before a long wait is handled after it.
        deadline = time.monotonic() + 60
        while not asked and time.monotonic() < deadline:
            time.sleep(0.05)
        return "saved" if asked else "not asked"

    call = (save_on_sigterm, (), {}, ready.exists)
    assert LocalBackend(1).run(call_without_notifications, call) == ["saved"]


@pytest.mark.parametrize("wrong", [True, "http://169.254.169.254/", 30])
def test_a_check_is_a_function(wrong: Any) -> None:
    message = "preemption_check: expected a function without arguments"
    with pytest.raises(ParamError, match=message):
        hvd_estimators.run(int, preemption_check=wrong)
    from hvd_estimators.torch import TorchEstimator

    with pytest.raises(ParamError, match=message):
        TorchEstimator(preemption_check=wrong)
