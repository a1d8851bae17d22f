"""Ranks that are forks of a process that has already imported their modules."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
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

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank.environment import (
    IDENTITY_VARIABLES,
    Master,
    assign_ranks,
    rank_environment,
    torchrun_environment,
)
from hvd_estimators.launch.rank.hang_detection import stall_environment
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.process import RankProcess, pickle_call
from hvd_estimators.launch.rendezvous.channel import new_secret, ranks_key
from hvd_estimators.launch.rendezvous.client import LocalRendezvousClient
from hvd_estimators.launch.rendezvous.gloo_http import GlooProxy, listening_environment
from hvd_estimators.launch.rendezvous.server import JobStore
from hvd_estimators.launch.service.server import SERVICE_VARIABLE
from hvd_estimators.launch.warm import client
from hvd_estimators.launch.warm.client import WarmStart, idle_seconds, warm_environment

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks ranks"),
]


@pytest.fixture(autouse=True)
def _own_processes() -> Iterator[None]:
    """End all warm processes of this process, also those of earlier tests."""
    for process in warm_processes():
        process.kill()
    wait_until(lambda: not warm_processes())
    yield
    for process in warm_processes():
        process.kill()


def sockets(owner: int | None = None) -> set[str]:
    """Return the names of an owner's warm processes' sockets, by default of this process's."""
    prefix = f"@hvd-estimators-{owner or os.getpid()}."
    names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
    return {name[1:] for name in names if name.startswith(prefix)}


def warm_processes(owner: int | None = None) -> list[psutil.Process]:
    """Return the warm processes of an owner, by default this process."""
    mark = f'"name": "hvd-estimators-{owner or os.getpid()}.'
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        # Forks have the same command line, but lead sessions; a warm process's leader has ended.
        with contextlib.suppress(ProcessLookupError):
            if mark in command[-1] and not psutil.pid_exists(os.getsid(process.pid)):
                found.append(process)
    return found


def rank(call: bytes, start: WarmStart | None = None, **env: str) -> RankProcess:
    start = start or WarmStart(["numpy"], [os.getpid()])
    return RankProcess(3, "here", call, {**os.environ, **env}, warm=start)


def run(fn: Any, *args: Any, start: WarmStart | None = None, **env: str) -> RankOutcome:
    with rank(pickle_call(fn, args, {}), start, **env) as process:
        return process.outcome()


def value(fn: Any, *args: Any, start: WarmStart | None = None, **env: str) -> Any:
    outcome = run(fn, *args, start=start, **env)
    assert outcome.result is not None, outcome
    return pickle.loads(outcome.result)


def test_ranks_of_one_warm_process_share_only_its_imports() -> None:
    def look() -> dict[str, Any]:
        imported = "numpy" in sys.modules
        import multiprocessing
        import random
        import tempfile
        import uuid

        import numpy as np

        return {
            "imported": imported,
            "guardian": os.getppid(),
            "drawn": (
                random.random(),
                np.random.rand(),
                uuid.uuid4(),
                next(tempfile._get_candidate_names()),
                bytes(multiprocessing.current_process().authkey),
            ),
            "argv": [Path(sys.argv[0]).name, Path(sys.argv[1]).is_dir()],
            "input": sys.stdin.read(),
            "rank": os.environ.get("HOROVOD_RANK"),
            "token": os.environ.get("HVD_ESTIMATORS_TOKEN"),
            "session": os.getsid(0),
            "threads": len(os.listdir("/proc/self/task")),
            "open": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)),
            "sockets": sum(
                os.readlink(path).startswith(("socket:", "anon_inode:[pidfd]"))
                for path in map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd"))
                if os.path.lexists(path)
            ),
            "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGCHLD)],
        }

    first = value(look, HOROVOD_RANK="0", HVD_ESTIMATORS_TOKEN="of rank 0")
    second = value(look, HOROVOD_RANK="1")
    with RankProcess(3, "here", pickle_call(look, (), {}), os.environ) as process:
        fresh = pickle.loads(process.outcome().result or b"")

    assert [looked["imported"] for looked in (first, second, fresh)] == [True, True, False]
    assert len(warm_processes()) == 1
    for one, other in zip(first["drawn"], second["drawn"], strict=True):
        assert one != other
    assert (first["rank"], second["rank"]) == ("0", "1")
    assert (first["token"], second["token"]) == ("of rank 0", None)
    for forked in (first, second):
        assert forked["session"] == forked["guardian"]
        for name in ("argv", "input", "sockets", "signals"):
            assert forked[name] == fresh[name], name
        assert forked["threads"] == 1
        assert forked["open"][0] == "/dev/null"


def test_the_end_of_a_forked_rank_is_reported_like_that_of_a_fresh_one() -> None:
    def fail() -> None:
        print("before the end")
        raise ValueError("no")

    raised = run(fail)
    assert (raised.error_type, raised.output_tail[:15]) == ("ValueError", "before the end\n")
    assert "exited with status 3" in run(os._exit, 3).error
    assert "killed by SIGSEGV" in run(lambda: os.kill(os.getpid(), signal.SIGSEGV)).error
    assert "killed by SIGKILL" in run(lambda: (os.kill(os.getppid(), 9), time.sleep(60))).error
    # None of these ended the process that forked the rank.
    assert len(warm_processes()) == 1


@pytest.mark.parametrize("how", ["abort", "leave", "kill the warm process, and leave"])
def test_an_abandoned_forked_rank_ends_with_all_its_children(tmp_path: Path, how: str) -> None:
    def sleep_and_tell(path: str) -> None:
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        Path(f"{path}.partial").write_text(f"{os.getpid()} {child.pid}")
        Path(f"{path}.partial").rename(path)
        time.sleep(300)

    path = tmp_path / "pids"
    with rank(pickle_call(sleep_and_tell, (str(path),), {})) as process:
        started = pids(path)
        if how == "abort":
            assert process.abort().error_type == "aborted"
        elif how != "leave":
            (warm_process,) = warm_processes()
            warm_process.kill()
            wait_until(lambda: ended(warm_process.pid))
            assert process.running()
    wait_until(lambda: all(map(ended, started)))


OWNER = """
import os, sys, time
from pathlib import Path
from hvd_estimators.launch.warm import client
from hvd_estimators.launch.rendezvous.gloo_http import listening_environment
from hvd_estimators.launch.rendezvous.channel import new_secret, ranks_key
from hvd_estimators.launch.service.server import SERVICE_VARIABLE
from hvd_estimators.launch.rendezvous.gloo_http import GlooProxy
from hvd_estimators.launch.rendezvous.server import JobStore
from hvd_estimators.launch.rank.process import RankProcess
from hvd_estimators.launch.rank.environment import assign_ranks, rank_environment
from hvd_estimators.launch.rendezvous.client import LocalRendezvousClient
from hvd_estimators.launch.rank.hang_detection import stall_environment
from hvd_estimators.launch.warm.client import WarmStart, warm_environment

start = WarmStart([], [os.getpid()])
with RankProcess(0, "here", Path(sys.argv[1]).read_bytes(), os.environ, warm=start) as process:
    process.outcome()
"""


def test_no_process_or_socket_remains_when_the_owner_is_killed(tmp_path: Path) -> None:
    """The warm process, a rank that holds the GIL, and a child in a separate session."""

    def hold_the_lock(path: str) -> None:
        import ctypes

        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        Path(f"{path}.partial").write_text(f"{os.getpid()} {child.pid}")
        Path(f"{path}.partial").rename(path)
        ctypes.PyDLL(None).sleep(300)

    call, path = tmp_path / "call", tmp_path / "pids"
    call.write_bytes(pickle_call(hold_the_lock, (str(path),), {}))
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER), str(call)])
    try:
        started = pids(path)
        (process,) = warm_processes(owner.pid)
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: all(map(ended, [*started, process.pid])))
    wait_until(lambda: not sockets(owner.pid))


def test_a_warm_process_is_idle_from_the_end_of_its_last_rank_on() -> None:
    start = WarmStart([], [os.getpid()], idle_seconds=0.3)
    with rank(pickle_call(time.sleep, (60,), {}), start):
        wait_until(warm_processes)
        time.sleep(1.5)
        assert warm_processes()
    wait_until(lambda: not warm_processes())


def test_a_warm_process_is_idle_for_a_minute_unless_the_environment_sets_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert WarmStart([], []).idle_seconds == idle_seconds({}) == 60
    start = WarmStart.of_executor([], {"HVD_ESTIMATORS_WARM_SECONDS": "600"})
    assert start.idle_seconds == 600
    assert not client.allows_warm_start({"HVD_ESTIMATORS_WARM_SECONDS": "0"})
    monkeypatch.setenv("HVD_ESTIMATORS_WARM_SECONDS", "ten minutes")
    with pytest.raises(ParamError, match="HVD_ESTIMATORS_WARM_SECONDS: expected seconds, such as"):
        LocalBackend(1).run(int)


def test_the_warm_environment_excludes_variables_of_a_rank() -> None:
    """Otherwise every rank, and the preparation for it, would need a separate warm process."""
    (slot,) = assign_ranks(["here"])
    with GlooProxy(LocalRendezvousClient(JobStore(), 0), size=1) as proxy:
        own = {
            **dict.fromkeys(IDENTITY_VARIABLES, "inherited"),
            **rank_environment(slot),
            **torchrun_environment(slot, Master("10.0.0.1", 1234, "run"), has_own_gpus=False),
            **listening_environment("127.0.0.1"),
            **proxy.environment(),
            **ranks_key(new_secret()),
            **stall_environment({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}),
            "CUDA_VISIBLE_DEVICES": "1",
            "PYTEST_CURRENT_TEST": "a test",
            SERVICE_VARIABLE: "where",
        }
    present = {name: value or "inherited" for name, value in own.items()}
    assert warm_environment({**present, "OMP_NUM_THREADS": "1"}) == {"OMP_NUM_THREADS": "1"}


def test_variables_read_at_import_time_select_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guardians_parent() -> tuple[int, str | None]:
        return psutil.Process(os.getppid()).ppid(), os.environ.get("OMP_NUM_THREADS")

    base = value(guardians_parent, OMP_NUM_THREADS="1")
    assert value(guardians_parent, OMP_NUM_THREADS="1", HOROVOD_RANK="7") == base
    other = value(guardians_parent, OMP_NUM_THREADS="2")
    assert (base[1], other[1]) == ("1", "2")
    assert base[0] != other[0]
    # A third one ends the others.
    monkeypatch.chdir(tmp_path)
    assert value(guardians_parent, OMP_NUM_THREADS="2")[0] not in (base[0], other[0])
    wait_until(lambda: len(warm_processes()) == 1)
    assert warm_processes()[0].pid not in (base[0], other[0])


def python_path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), *filter(None, sys.path)])


@pytest.mark.parametrize(
    "how", ["threads", "exits", "hangs up", "strangers socket", "starts slowly"]
)
def test_a_fresh_process_runs_if_forking_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    source = {
        "threads": "import threading\nthreading.Timer(9, print).start()\n",
        "exits": "import os\nos._exit(7)\n",
        "hangs up": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    }.get(how, "")
    (tmp_path / "odd.py").write_text(source)
    if how == "strangers socket":
        monkeypatch.setattr(client, "peer_of", lambda connection: (1, os.getuid() + 1))
    if how == "starts slowly":
        monkeypatch.setattr(client, "_IMPORT_SECONDS", 0.001)
    start = WarmStart(["odd"], [os.getpid()])

    def name() -> list[str]:
        return psutil.Process(os.getppid()).cmdline()

    with caplog.at_level(logging.WARNING):
        command = value(name, start=start, PYTHONPATH=python_path(tmp_path))
    assert "--warm" not in command
    assert len(caplog.records) == 1
    assert "starts in a fresh process" in caplog.text
    assert ("TimeoutExpired" in caplog.text) == (how == "starts slowly")
    if how != "starts slowly":  # such a process ends when it has been idle
        other = {**os.environ, "PYTHONPATH": python_path(tmp_path), "OTHER": "1"}
        start.prepare(sys.executable, other)
