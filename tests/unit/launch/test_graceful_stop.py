"""Graceful stops of ranks that ask for time, and immediate stops of all others."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from processes import ended, pids, wait_until

from hvd_estimators.launch.rank.graceful_stop import GRACE_VARIABLE
from hvd_estimators.launch.rank.process import RankProcess, pickle_call
from hvd_estimators.launch.rank.supervisor import supervise
from hvd_estimators.training.step_control import StopRequest, interrupted

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(60)

PARENT = """
import os, sys
from pathlib import Path
from hvd_estimators.launch.rank.process import RankProcess

with RankProcess(0, "here", Path(sys.argv[1]).read_bytes(), os.environ) as process:
    process.outcome()
"""


def train(folder: str, saving: float = 0.0) -> None:
    """Take steps until asked to end, and save; the child lives until the rank has ended."""
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with StopRequest(lambda own: own, 1) as stop:
        started = Path(folder, f"{os.environ.get('NUMBER', '0')}.partial")
        started.write_text(f"{os.getpid()} {child.pid}")
        step = 0
        while not stop.after_step():
            step += 1
            # Lines that remain unread at the end.
            print("step", step, flush=True)
            if step == 1:  # a request before the first step would save 0
                started.rename(started.with_suffix(".started"))
            time.sleep(0.005)
        time.sleep(saving)
        started.with_suffix(".saved").write_text(str(step))
        raise interrupted(0, step, saved=True)


def hold_the_lock(folder: str) -> None:
    """Ask for time, and never check for the request."""
    with StopRequest(lambda own: own, 1):
        Path(folder, "0.partial").write_text(str(os.getpid()))
        Path(folder, "0.partial").rename(Path(folder, "0.started"))
        while True:  # a signal ends the sleep
            ctypes.PyDLL(None).sleep(300)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Any]:
    """Start a process that runs a rank; return the process and the PIDs of the rank's processes."""
    started = []

    def start(function: Any, grace: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        program, call, scratch = (tmp_path / name for name in ("parent.py", "call", "scratch"))
        program.write_text(textwrap.dedent(PARENT))
        call.write_bytes(pickle_call(function, (str(tmp_path),), {}))
        scratch.mkdir()
        env = {**os.environ, "TMPDIR": str(scratch), GRACE_VARIABLE: grace}
        process = subprocess.Popen([sys.executable, str(program), str(call)], env=env)
        started.append(process)
        return process, pids(tmp_path / "0.started")

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_saves_and_cleans_up_when_its_parent_is_killed(
    tmp_path: Path, parent: Any, end: signal.Signals
) -> None:
    process, ranks = parent(train, "30")
    process.send_signal(end)
    wait_until(lambda: all(map(ended, ranks)))
    assert int((tmp_path / "0.saved").read_text()) > 0
    wait_until(lambda: list((tmp_path / "scratch").iterdir()) == [])


@pytest.mark.parametrize("grace", ["0.5", "0"])
def test_a_rank_is_killed_when_its_grace_period_expires(
    tmp_path: Path, parent: Any, grace: str
) -> None:
    process, ranks = parent(hold_the_lock, grace)
    started = time.monotonic()
    process.kill()
    wait_until(lambda: all(map(ended, ranks)))
    assert time.monotonic() - started >= float(grace)
    wait_until(lambda: list((tmp_path / "scratch").iterdir()) == [])


def train_beside_a_fork(folder: str) -> None:
    """Train, and print more than a pipe holds after the request to end."""
    with StopRequest(lambda own: own, 1) as stop:
        child = os.fork()
        if not child:
            time.sleep(300)
        started = Path(folder, "0.partial")
        started.write_text(f"{os.getpid()} {child}")
        started.rename(started.with_suffix(".started"))
        while not stop.after_step():
            time.sleep(0.005)
        print("x" * 200_000, flush=True)
        started.with_suffix(".saved").touch()


@pytest.mark.forks
def test_no_print_blocks_a_rank_that_saves_if_a_fork_shares_its_output(
    tmp_path: Path, parent: Any
) -> None:
    process, ranks = parent(train_beside_a_fork, "30")
    process.kill()
    wait_until(lambda: (tmp_path / "0.saved").exists(), 20)
    wait_until(lambda: all(map(ended, ranks)))


def test_abort_kills_a_rank_without_a_grace_period(tmp_path: Path) -> None:
    call = pickle_call(hold_the_lock, (str(tmp_path),), {})
    with RankProcess(0, "here", call, {**os.environ, GRACE_VARIABLE: "600"}) as process:
        (rank,) = pids(tmp_path / "0.started")
        assert process.abort().error_type == "aborted"
        assert ended(rank)


def test_sigterm_to_the_guardian_stops_the_rank_gracefully(tmp_path: Path) -> None:
    """Processes may be terminated one by one; the parent still learns how the rank ended."""
    call = pickle_call(train, (str(tmp_path),), {})
    with RankProcess(0, "here", call, os.environ) as process:
        rank, child = pids(tmp_path / "0.started")
        guardian = psutil.Process(rank).parent()
        assert guardian is not None
        guardian.terminate()
        outcome = process.outcome()
    assert (tmp_path / "0.saved").exists()
    assert outcome.error_type == "TrainingInterruptedError"
    assert "step 1" in outcome.output_tail
    assert ended(child)


def test_a_rank_that_asks_for_no_time_is_killed_with_its_guardian(tmp_path: Path) -> None:
    def work(folder: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(folder, "pid.partial").write_text(str(os.getpid()))
        Path(folder, "pid.partial").rename(Path(folder, "pid"))
        time.sleep(300)

    with RankProcess(0, "here", pickle_call(work, (str(tmp_path),), {}), os.environ) as process:
        (rank,) = pids(tmp_path / "pid")
        guardian = psutil.Process(rank).parent()
        assert guardian is not None
        guardian.terminate()
        outcome = process.outcome()
        assert ended(rank)
    assert "killed by SIGTERM" in outcome.error


def test_an_interrupt_stops_all_ranks_at_the_same_time(tmp_path: Path) -> None:
    """Each takes a second to save; saving in turn would take three seconds."""
    call = pickle_call(train, (str(tmp_path), 1.0), {})
    environments = [{**os.environ, "NUMBER": str(rank)} for rank in range(3)]
    processes = [RankProcess(rank, "here", call, env) for rank, env in enumerate(environments)]

    def interrupt() -> None:
        if len(list(tmp_path.glob("*.started"))) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), processes[0], processes[1], processes[2]:
        supervise(processes, interrupt)

    saved = sorted(path.stat().st_mtime for path in tmp_path.glob("*.saved"))
    assert len(saved) == 3
    assert saved[-1] - saved[0] < 1.0
