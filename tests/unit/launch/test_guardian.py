"""Guardians, which end a rank and all its processes with their owner, even if busy."""

import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import cloudpickle
import psutil
import pytest
from other_systems import like_macos
from processes import ended, pids, wait_until

from hvd_estimators.launch.rank.process import RankProcess, pickle_call

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(60)

PARENT = """
import os, pickle, sys
from pathlib import Path
from hvd_estimators.launch.rank.process import RankProcess

with RankProcess(0, "here", Path(sys.argv[1]).read_bytes(), os.environ) as process:
    if sys.argv[2] == "fork" and not os.fork():
        Path(sys.argv[3]).write_text(str(os.getpid()))
        signal_never_comes = os.pipe()[0]
        os.read(signal_never_comes, 1)
    process.outcome()
"""


def start_and_hold_the_lock(path):
    """Start children inside and outside this session, write all PIDs, and hold the GIL."""
    children = [
        subprocess.Popen(["sleep", "300"], start_new_session=apart) for apart in (False, True)
    ]
    partial = Path(f"{path}.partial")
    partial.write_text(" ".join(str(pid) for pid in (os.getpid(), *(c.pid for c in children))))
    partial.rename(path)
    ctypes.PyDLL(None).sleep(300)


@pytest.fixture
def environment():
    """Return the environment of ranks."""
    return dict(os.environ)


@pytest.fixture
def parent(tmp_path, environment):
    """Start a process that runs a rank; return the process and the PIDs of rank and children."""
    started = []

    def start(how="alone"):
        program, call, path = (tmp_path / name for name in ("parent.py", "call", "pids"))
        program.write_text(textwrap.dedent(PARENT))
        call.write_bytes(pickle_call(start_and_hold_the_lock, (str(path),), {}))
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        command = [sys.executable, str(program), str(call), how, str(tmp_path / "fork")]
        process = subprocess.Popen(command, env={**environment, "TMPDIR": str(scratch)})
        started.append(process)
        return process, pids(path)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_holds_the_lock_ends_when_its_parent_is_killed(tmp_path, parent, end):
    process, ranks = parent()
    assert not any(map(ended, ranks))

    process.send_signal(end)

    wait_until(lambda: all(map(ended, ranks)))
    wait_until(lambda: list((tmp_path / "scratch").iterdir()) == [])


def processes_with(folder):
    """Return the processes whose temporary folder is this one."""
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        of_test = (process.info["environ"] or {}).get("TMPDIR") == str(folder)
        if of_test and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.parametrize(
    "delays",
    [
        pytest.param([0.02 * i for i in range(3, 60, 15)], id="some"),
        pytest.param(
            [0.01 * i for i in range(120)],
            id="many",
            marks=[pytest.mark.soak, pytest.mark.timeout(600)],
        ),
    ],
)
def test_no_process_remains_whenever_the_parent_is_killed(tmp_path, environment, delays):
    """While the parent starts the rank, the rank its guardian or its children, and later."""
    program, call = tmp_path / "parent.py", tmp_path / "call"
    program.write_text(PARENT)
    call.write_bytes(pickle_call(start_and_hold_the_lock, (str(tmp_path / "pids"),), {}))
    for i, delay in enumerate(delays):
        scratch = tmp_path / f"scratch{i}"
        scratch.mkdir()
        of_parent = {**environment, "TMPDIR": str(scratch)}
        parent = subprocess.Popen([sys.executable, program, call, "alone"], env=of_parent)
        time.sleep(delay)
        parent.kill()
        parent.wait()
        wait_until(lambda scratch=scratch: not processes_with(scratch))


def test_a_rank_ends_with_its_parent_even_if_a_fork_of_the_parent_survives(tmp_path, parent):
    process, ranks = parent("fork")
    (fork,) = pids(tmp_path / "fork")

    process.kill()

    wait_until(lambda: all(map(ended, ranks)))
    assert not ended(fork)
    os.kill(fork, signal.SIGKILL)


def test_a_rank_ends_when_its_guardian_is_killed(tmp_path, environment):
    path = tmp_path / "pids"
    call = pickle_call(start_and_hold_the_lock, (str(path),), {})
    with RankProcess(0, "here", call, environment) as process:
        rank, child, apart = pids(path)
        psutil.Process(rank).parent().kill()
        outcome = process.outcome()

        assert "killed by SIGKILL" in outcome.error
        wait_until(lambda: ended(rank) and ended(child))
    os.kill(apart, signal.SIGKILL)


def test_a_rank_ends_when_guardian_and_parent_are_killed_together(tmp_path, environment):
    path, program, call = (tmp_path / name for name in ("pid", "parent.py", "call"))

    def sleep(path):
        partial = Path(f"{path}.partial")
        partial.write_text(f"{os.getpid()} {os.getppid()}")
        partial.rename(path)
        time.sleep(300)

    program.write_text(PARENT)
    call.write_bytes(pickle_call(sleep, (str(path),), {}))
    parent = subprocess.Popen([sys.executable, program, call, "alone"], env=environment)
    rank, guardian = pids(path)

    for pid in (parent.pid, guardian):
        os.kill(pid, signal.SIGSTOP)
    for pid in (parent.pid, guardian):
        os.kill(pid, signal.SIGKILL)
    parent.wait()

    wait_until(lambda: ended(rank))


@pytest.mark.parametrize("ignoring", [False, True])
def test_children_end_with_their_rank_without_delaying_its_result(environment, ignoring):
    """They hold the rank's output open; one has a separate session, and one has no parent."""

    def start():
        trap = "trap '' TERM; " if ignoring else ""
        script = f"{trap}echo $$; while true; do sleep 300; done"
        children = [
            subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=apart)
            for apart in (False, True)
        ]
        orphan = subprocess.run(
            ["sh", "-c", f"{trap}setsid sleep 300 >&2 & echo $!"],
            stdout=subprocess.PIPE,
            check=True,
        )
        return [int(child.stdout.readline()) for child in children], int(orphan.stdout)

    started = time.monotonic()
    with RankProcess(3, "here", pickle_call(start, (), {}), environment) as process:
        result = pickle.loads(process.outcome().result)

        children, orphan = result
        assert all(map(ended, [*children, orphan]))
    assert time.monotonic() - started < 15


def ignored_signals(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("SigIgn:")[2].split()[0], 16)


def test_helper_processes_clean_up_after_a_killed_rank(environment):
    def leave_shared_memory():
        memory = shared_memory.SharedMemory(create=True, size=100)
        print(memory.name)
        sys.stdout.flush()
        # Once the helper has started, it ignores SIGTERM.
        helper = resource_tracker._resource_tracker._pid
        while not ignored_signals(helper) >> signal.SIGTERM - 1 & 1:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    with RankProcess(3, "here", pickle_call(leave_shared_memory, (), {}), environment) as process:
        outcome = process.outcome()

    name = outcome.output_tail.splitlines()[0]
    assert name.startswith("psm_")
    assert not Path("/dev/shm", name).exists()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM, signal.SIGINT])
def test_the_signal_that_ended_a_rank_is_named(environment, number):
    def end():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with RankProcess(3, "here", pickle_call(end, (), {}), environment) as process:
        assert f"killed by {number.name}" in process.outcome().error


def test_a_rank_may_start_and_await_processes(environment):
    def work():
        codes = [subprocess.run(["sh", "-c", f"exit {i}"], check=False).returncode for i in (0, 7)]
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return codes, pool.map(abs, [-1, -2])

    with RankProcess(3, "here", pickle_call(work, (), {}), environment) as process:
        assert pickle.loads(process.outcome().result) == ([0, 7], [1, 2])


def test_without_safe_forks_a_rank_and_its_group_end_with_the_parent(tmp_path):
    """As on macOS; a thread of the rank notices the parent's end."""
    (tmp_path / "bin").mkdir()
    path, program, call = (tmp_path / name for name in ("pids", "parent.py", "call"))

    def start(path):
        child = subprocess.Popen(["sleep", "300"])
        partial = Path(f"{path}.partial")
        partial.write_text(f"{os.getpid()} {child.pid}")
        partial.rename(path)
        time.sleep(300)

    program.write_text(PARENT)
    call.write_bytes(pickle_call(start, (str(path),), {}))
    command = [sys.executable, program, call, "alone"]
    parent = subprocess.Popen(command, env=like_macos(tmp_path / "bin"))
    rank, child = pids(path)
    assert psutil.Process(rank).ppid() == parent.pid

    parent.kill()
    parent.wait()

    wait_until(lambda: ended(rank) and ended(child))
