"""Network outages and paused processes on two hosts, and port access by strangers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import wait_until
from two_hosts import Cluster, Host

from hvd_estimators.exceptions import WorkerFailedError

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(500), pytest.mark.once]


@pytest.fixture
def cluster(two_hosts: Cluster) -> Cluster:
    return two_hosts


def reduce_until(path: str) -> tuple[int, float]:
    """Reduce until a file exists; write this rank's steps, host and process beside that file."""
    import socket

    import horovod.torch as hvd
    import torch

    hvd.init()
    place, own = Path(path), Path(f"{path}.{hvd.rank()}")
    steps, total = 0, torch.zeros(2)
    while not total[1]:
        here = torch.tensor([hvd.rank() + 1.0, float(place.exists())])
        total = hvd.allreduce(here, op=hvd.Sum)
        steps += 1
        partial = own.with_name(f"{own.name}.partial")
        partial.write_text(f"{steps} {socket.gethostname()} {os.getpid()}")
        partial.rename(own)
        time.sleep(0.02)
    return steps, float(total[0])


def run_job(path: str) -> list[tuple[int, float]]:
    from hvd_estimators.launch.spark_backend import SparkBackend

    return SparkBackend(2).run(reduce_until, (path,))


class Running:
    """A job whose ranks reduce until `result` is called."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self._end = cluster, cluster.folder / name
        self._job = cluster.submit(run_job, str(self._end))
        try:
            wait_until(lambda: min(self._steps()) >= 5, 60)
        except AssertionError:
            self._job.result(1)  # usually has a better message
            raise
        named = {host.run("hostname").strip(): host for host in (cluster.first, cluster.second)}
        self.hosts = [named[self._told(rank)[1]] for rank in range(2)]
        self.ranks = [int(self._told(rank)[2]) for rank in range(2)]

    def _told(self, rank: int) -> list[str]:
        own = Path(f"{self._end}.{rank}")
        return own.read_text().split() if own.exists() else ["0"]

    def _steps(self) -> list[int]:
        return [int(self._told(rank)[0]) for rank in range(2)]

    def goes_on(self, seconds: float) -> None:
        """Wait until both ranks have reduced more than five times."""
        before = self._steps()
        wait_until(
            lambda: all(now > b + 5 for now, b in zip(self._steps(), before, strict=True)), seconds
        )

    def result(self) -> Any:
        self._end.touch()
        return self._job.result(120)

    def error(self, seconds: float) -> BaseException:
        with pytest.raises(Exception) as raised:  # noqa: PT011
            self._job.result(seconds)
        return raised.value


def python_tasks(host: Host) -> list[int]:
    """Return the Python processes of a host's Spark worker, the ranks among them."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(psutil.Process(pid).cmdline())
            if "pyspark.daemon" in words or "hvd_estimators" in words:
                found.append(pid)
    return found


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("cut", "stop"),
    [(8, 8), (25, 30)],
    ids=["seconds", "half a minute"],
)
def test_jobs_survive_short_network_outages_and_paused_processes(
    cluster: Cluster, cut: float, stop: float
) -> None:
    job = Running(cluster, f"apart-{cut}")

    cluster.second.set_link("down")
    try:
        time.sleep(cut)
    finally:
        cluster.second.set_link("up")
    # TCP retransmits after pauses that double.
    job.goes_on(3 * cut + 10)

    for host in job.hosts:
        with stopped(python_tasks(host)):
            time.sleep(stop)
        job.goes_on(20)

    (steps, total), (others_steps, others_total) = job.result()
    assert steps == others_steps
    assert total == others_total == 3.0


_STRANGER = """
import socket, sys
for place in sys.argv[1:]:
    address, port = place.split(",")
    for said in (b"", b"GET /global/0 HTTP/1.1\\r\\n\\r\\n", b"\\0" * 200):
        received = b""
        try:
            with socket.create_connection((address, int(port)), 5) as connection:
                connection.sendall(said)
                connection.settimeout(8)
                while part := connection.recv(1000):
                    received += part
        except OSError:
            pass
        print(len(received), received[:12])
"""

_LOCAL_USER = """
if cat /proc/$1/environ > /dev/null 2>&1; then echo "environment read"; fi
for port in $2; do
  for request in "GET /global/0" "PUT /global/0" "DELETE /global/0" "POST /global/0"; do
    exec 3<> /dev/tcp/127.0.0.1/$port
    printf '%s HTTP/1.1\\r\\nContent-Length: 0\\r\\n\\r\\n' "$request" >&3
    timeout 5 head -c 12 <&3
    echo
  done
done
"""


def listening(host: Host) -> list[tuple[str, int]]:
    """Return the addresses and ports that Python processes listen on."""
    # Spark's own daemon, which starts the others, does not count.
    python = set(python_tasks(host))
    ours = {pid for pid in python if psutil.Process(pid).ppid() in python}
    places = []
    for line in host.run("ss", "-Hltnp").splitlines():
        if ours & set(map(int, re.findall(r"pid=(\d+)", line))):
            address, port = line.split()[3].rsplit(":", 1)
            places.append((address.strip("[]"), int(port)))
    return places


@pytest.mark.soak
def test_strangers_and_other_users_are_rejected_on_every_port(cluster: Cluster) -> None:
    job = Running(cluster, "strangers")
    places = {host: listening(host) for host in (cluster.first, cluster.second)}
    open_ones = [place for found in places.values() for place in found if place[0] != "127.0.0.1"]
    # Only rank 0's task listens on the network; the other ports are the daemons'.
    assert [address for address, _ in open_ones] == [job.hosts[0].address]

    asked = [f"{address},{port}" for address, port in open_ones]
    said = cluster.stranger.run(sys.executable, "-c", _STRANGER, *asked)
    # The answer is a random challenge and nothing else.
    assert {int(line.split()[0]) for line in said.splitlines()} == {32}

    for host, rank in zip(job.hosts, job.ranks, strict=True):
        ports = [str(port) for address, port in places[host] if address == "127.0.0.1"]
        command = ["bash", "-c", _LOCAL_USER, "bash", str(rank), " ".join(ports)]
        other = subprocess.run(
            host.inside(command, user=65534),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        answers = [line for line in other.stdout.splitlines() if line]
        assert "environment read" not in answers
        assert answers.count("HTTP/1.1 401") >= 4, other.stdout + other.stderr
        assert not [line for line in answers if line.startswith("HTTP/1.1 2")]

    job.goes_on(10)
    assert [total for _, total in job.result()] == [3.0, 3.0]


@pytest.mark.soak
def test_a_lost_link_ends_the_job_and_is_reported(cluster: Cluster) -> None:
    job = Running(cluster, "lost")
    started = time.monotonic()

    cluster.second.set_link("down")
    try:
        time.sleep(75)
    finally:
        cluster.second.set_link("up")
    error = job.error(60)

    assert time.monotonic() - started < 120
    assert isinstance(error, WorkerFailedError), error
    # Spark's own limit is equally long, and may expire first.
    if error.rank is None:
        assert "An executor, or its Python process, has ended" in str(error)
    else:
        assert re.search(r"rank [01] on \S+ has not (answered|been heard of) for 6\d s", str(error))
        assert error.rank in (0, 1)
