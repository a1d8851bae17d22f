"""Hanging launches on two hosts: the driver soon names the rank, the host and the stage."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from two_hosts import Cluster, Host

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.once]

# The module's fixture makes the first launch.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# The acceptance limit, from the hang to the line on the driver.
_SECONDS = 15.0 * float(os.environ.get("HVD_TEST_PATIENCE", "1"))


@pytest.fixture(scope="module")
def started(two_hosts: Cluster) -> Cluster:
    """Launch once, so that later launches do not wait for Spark's own start."""
    two_hosts.first.rename("host-a", None)
    two_hosts.second.rename("host-b", None)
    two_hosts.run(launch, print)
    return two_hosts


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    try:
        yield started
    finally:
        for host in (started.first, started.second):
            host.signal(signal.SIGCONT)


def launch(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    from hvd_estimators.launch.spark_backend import SparkBackend

    return SparkBackend(2, warm_start=False, **options).run(fn, args)


def launch_with(options: dict[str, Any], fn: Callable[..., Any], *args: Any) -> list[Any]:
    return launch(fn, *args, **options)


class Hanging:
    """An argument that causes a fault on host-b while the rank unpickles it."""

    def __init__(self, fault: Callable[[str], None], folder: str) -> None:
        self.given = fault, folder

    def __reduce__(self) -> tuple[Any, ...]:
        return cause, self.given


def launch_hanging(fault: Callable[[str], None], folder: str) -> list[Any]:
    return launch(int, Hanging(fault, folder))


def cause(fault: Callable[[str], None], folder: str) -> int:
    import socket

    Path(folder, socket.gethostname()).touch()
    if socket.gethostname() == "host-b":
        # Otherwise the other rank may still wait for this rank's task, in an earlier stage.
        while not Path(folder, "host-a").exists():
            time.sleep(0.05)
        Path(folder, "hangs").touch()
        fault(folder)
    return 2


def stop_itself(folder: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_its_task(folder: str) -> None:
    # The guardian is the process between the rank and its task.
    os.kill(psutil.Process().parents()[1].pid, signal.SIGSTOP)


def wait_for_release(folder: str) -> None:
    while not Path(folder, "release").exists():
        time.sleep(0.1)


def pids_of(host: Host, module: str) -> list[int]:
    """Return the processes on a host that run a Python module."""
    found = []
    for pid in host.pids():
        try:
            if module in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def await_warning(cluster: Cluster, seen: int, pattern: str, since: float) -> None:
    """Wait until the driver prints a line, for at most 15 s after `since`."""
    log = cluster.folder / "driver.log"
    while not (found := re.search(pattern, log.read_text()[seen:])):
        assert time.time() < since + _SECONDS, log.read_text()[seen:]
        time.sleep(0.1)
    print(f"after {time.time() - since:.1f} s: {found[0]}")


def log_size(cluster: Cluster) -> int:
    return len((cluster.folder / "driver.log").read_text())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(stop_itself, id="stopped"),
        pytest.param(wait_for_release, id="slow import", marks=pytest.mark.soak),
        pytest.param(stop_its_task, id="stopped task", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_does_not_call_its_function_is_named(
    cluster: Cluster, tmp_path: Path, fault: Callable[[str], None]
) -> None:
    seen = log_size(cluster)
    job = cluster.submit(launch_hanging, fault, str(tmp_path))
    hangs = tmp_path / "hangs"
    while not hangs.exists():
        time.sleep(0.05)

    pattern = "The launch waits for rank [01] on host-b, in stage 'connected'"
    await_warning(cluster, seen, pattern, hangs.stat().st_mtime)
    (tmp_path / "release").touch()
    cluster.second.signal(signal.SIGCONT)
    assert job.result(90) == [2, 2]


def test_a_rank_whose_python_does_not_start_is_named(cluster: Cluster, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f"while [ $(hostname) = host-b ] && [ ! -e {tmp_path}/release ]; do sleep 0.1; done\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    tmp_path.chmod(0o755)
    seen, started = log_size(cluster), time.time()
    job = cluster.submit(launch_with, {"executable": str(python)}, len, "ab")

    pattern = r"The launch waits for rank [01] on host-b, in stage 'connected'"
    await_warning(cluster, seen, pattern, started)
    (tmp_path / "release").touch()
    assert job.result(90) == [2, 2]


def test_a_task_whose_python_does_not_start_is_named(cluster: Cluster) -> None:
    daemons = pids_of(cluster.second, "pyspark.daemon")
    assert daemons
    for pid in daemons:
        os.kill(pid, signal.SIGSTOP)
    seen, started = log_size(cluster), time.time()
    job = cluster.submit(launch, len, "ab")

    pattern = "The launch waits for the rank of task [01], in stage 'waiting'"
    await_warning(cluster, seen, pattern, started)
    cluster.second.signal(signal.SIGCONT)
    assert job.result(90) == [2, 2]


def test_hosts_that_do_not_reach_each_other_are_named(cluster: Cluster) -> None:
    route = ("blackhole", f"{cluster.first.only6}/128")
    cluster.second.run("ip", "-6", "route", "add", *route)
    try:
        seen, started = log_size(cluster), time.time()
        job = cluster.submit(launch_with, {"nics": "six0"}, len, "ab")
        pattern = r"The launch waits for the rank of task 1 on host-[ab], in stage 'started'"
        await_warning(cluster, seen, pattern, started)
    finally:
        cluster.second.run("ip", "-6", "route", "del", *route)
    assert job.result(90) == [2, 2]
