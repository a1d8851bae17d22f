"""Standalone Spark cluster on network namespaces behind one switch.

`hosts_and_cluster` makes three hosts. Two have a Spark worker of one task slot each, and the first
also runs the master and the driver. The third is a stranger. Each host has a name and a hosts
file, which can be changed while the cluster runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyspark
from servers.driver import Application, Job, application

NETWORK, NETWORK6, NETWORK_ONLY6 = "10.177.0", "fd77", "fd78"
SAME_ADDRESS = "172.31.255.1"
"""An address of both hosts, on an interface without a route between them, like Docker's bridge."""

GPU = "3"
"""The address of each host's (pretended) GPU."""

_START_SECONDS = 120.0
_SPARK_HOME = str(Path(pyspark.__file__).parent)
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# Kill the processes in the namespaces, and delete the namespaces, when standard input closes:
# with the tests, whether or not they succeed.
_CLEANER = """
import os, shutil, signal, subprocess, sys, time
sys.stdin.read()
for name in sys.argv[1:]:
    for _ in range(100):
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        if not done.stdout.split():
            break
        for pid in map(int, done.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    shutil.rmtree("/etc/netns/" + name, ignore_errors=True)
"""


def why_not() -> str | None:
    """Return the reason why namespaces cannot be made here, or None."""
    if sys.platform != "linux" or shutil.which("ip", path=_PATH) is None:
        return "network namespaces need Linux and its ip command"
    name = f"hvd-trial-{os.getpid()}"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"network namespaces need root's rights: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class Host:
    """A network namespace with a separate host name, hosts file and addresses.

    Attributes
    ----------
    address, address6, only6 : str
        Its addresses on the shared network, and its address on a second network, without IPv4,
        at the interface ``six0``.
    alone : str
        The first address of its interface ``eth0``, which other hosts do not reach.
    """

    def __init__(self, prefix: str, switch: str, number: int) -> None:
        self.namespace, self._switch, self._number = f"{prefix}-{number}", switch, number
        self.address = f"{NETWORK}.{number}"
        self.address6, self.only6 = f"{NETWORK6}::{number}", f"{NETWORK_ONLY6}::{number}"
        self._etc = Path("/etc/netns", self.namespace)
        self._etc.mkdir(parents=True)
        (self._etc / "hosts").write_text("127.0.0.1 localhost\n")
        (self._etc / "nsswitch.conf").write_text("hosts: files\n")
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        # Programs that use an interface's first address, like Gloo, get an unreachable one.
        self.alone = f"203.0.113.{number}/32"
        self._add_link("eth0", "first", self.alone, f"{self.address}/24", f"{self.address6}/64")
        self._add_link("six0", "second", f"{self.only6}/64")
        _ip("-n", self.namespace, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self.namespace, "addr", "add", f"{SAME_ADDRESS}/16", "dev", "bridge0")
        _ip("-n", self.namespace, "link", "set", "bridge0", "up")
        # Keep the namespaces of the host name and the hosts file alive.
        naming = f"hostname host{number}; echo up; exec sleep 1d"
        self._keeper = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", naming],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"up\n"

    def rename(self, name: str, address: str | None) -> None:
        """Rename the host, where the name then resolves to the address, or not at all for None."""
        line = f"{address} {name}\n" if address else ""
        # Written in place, because running processes have the file mounted over /etc/hosts.
        (self._etc / "hosts").write_text(f"127.0.0.1 localhost\n{line}")
        self.run("hostname", name)

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """Run a command on the host and return its output; fail if the command fails."""
        done = subprocess.run(
            self.inside(command), capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *command: str, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Start a command on the host, with its output in a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.inside(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SPARK_LOCAL_IP": self.address, **env},
                start_new_session=True,
            )

    def inside(self, command: Sequence[str], user: int | None = None) -> list[str]:
        """Return a command that runs another command on the host, optionally as another user."""
        enter = ["nsenter", "--target", str(self._keeper.pid), "--net", "--uts", "--mount"]
        numbers = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [*enter, "--", *(["setpriv", *numbers] if user else []), *command]

    def set_link(self, state: str) -> None:
        """Unplug the host from the network (``down``) at the switch, or plug it in (``up``)."""
        _ip("-n", self._switch, "link", "set", f"first{self._number}", state)

    def pids(self) -> list[int]:
        """Return the processes of the host."""
        found = map(int, _ip("netns", "pids", self.namespace).stdout.split())
        return [pid for pid in found if pid != self._keeper.pid]

    def signal(self, number: signal.Signals) -> None:
        """Signal every process of the host: SIGSTOP pauses the host, SIGCONT resumes it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _add_link(self, interface: str, bridge: str, *addresses: str) -> None:
        port = f"{bridge}{self._number}"
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", interface)
        _ip("-n", self._switch, "link", "set", interface, "netns", self.namespace)
        _ip("-n", self._switch, "link", "set", port, "master", bridge, "up")
        for address in addresses:
            nodad = ["nodad"] if ":" in address else []
            _ip("-n", self.namespace, "addr", "add", address, "dev", interface, *nodad)
        _ip("-n", self.namespace, "link", "set", interface, "up")


class Cluster:
    """The hosts and the processes on them.

    Attributes
    ----------
    first, second, stranger : Host
        The host of the driver and a worker, the other worker's, and an unrelated one.
    folder : Path
        Shared by all hosts, like all files.
    """

    def __init__(self, first: Host, second: Host, stranger: Host, folder: Path) -> None:
        self.first, self.second, self.stranger, self.folder = first, second, stranger, folder
        self.master = f"spark://{first.address}:7077"
        self._application: Application | None = None

    def submit(self, fn: Callable[..., Any], *args: Any) -> Job:
        """Start ``fn(*args)`` in the driver, where a Spark session is active; one at a time."""
        assert self._application is not None
        return self._application.submit(fn, *args)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> Any:
        """Return the result of ``fn(*args)`` in the driver."""
        return self.submit(fn, *args).result(timeout)

    def logs(self) -> str:
        """Return the end of each process's log."""
        files = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("work/*/*/std*"))
        return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in files)

    @contextlib.contextmanager
    def driver(self, **conf: str) -> Iterator[None]:
        """Run a driver with Spark's defaults and the given configuration, until the block ends."""
        own = {
            "spark.master": self.master,
            "spark.executor.memory": "512m",
            "spark.executor.resource.gpu.amount": "1",
            "spark.task.resource.gpu.amount": "1",
            **conf,
        }
        with application(self.folder, own, start=self._start_driver, logs=self.logs) as made:
            self._application = made
            try:
                yield
            finally:
                self._application = None

    def _start_driver(
        self, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return self.first.start(*command, log=log, **env)

    def start_spark(self) -> None:
        """Start the master and the workers."""
        spark_class = f"{_SPARK_HOME}/bin/spark-class"
        deploy = "org.apache.spark.deploy"
        discovery = self.folder / "gpu.sh"
        discovery.write_text(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": ["{GPU}"]}}\'\n')
        discovery.chmod(0o755)
        gpus = "-Dspark.worker.resource.gpu"
        options = f"{gpus}.amount=1 {gpus}.discoveryScript={discovery}"
        env = {"SPARK_DAEMON_MEMORY": "256m", "PYSPARK_PYTHON": sys.executable}
        env["SPARK_WORKER_OPTS"] = options
        log = self.folder / "master.log"
        place = ["--host", self.first.address, "--port", "7077", "--webui-port", "0"]
        self.first.start(spark_class, f"{deploy}.master.Master", *place, log=log, **env)
        assert _until(lambda: "New state: ALIVE" in log.read_text()), self.logs()
        for host in (self.first, self.second):
            log = self.folder / f"worker-{host.address}.log"
            place = ["--host", host.address, "--webui-port", "0", "--cores", "1", "--memory", "1g"]
            place += ["--work-dir", str(self.folder / "work" / host.address)]
            host.start(spark_class, f"{deploy}.worker.Worker", *place, self.master, log=log, **env)


@contextlib.contextmanager
def hosts_and_cluster() -> Iterator[Cluster]:
    """Make the hosts and start Spark on them; stop and delete everything when the block ends."""
    with only_hosts() as cluster:
        cluster.start_spark()
        yield cluster


@contextlib.contextmanager
def only_hosts() -> Iterator[Cluster]:
    """Make the hosts without Spark; stop and delete everything when the block ends."""
    prefix = f"hvd-{os.getpid()}"
    switch = f"{prefix}-switch"
    folder = Path(tempfile.mkdtemp(prefix="hvd-estimators-hosts-"))
    folder.chmod(0o755)
    names = [f"{prefix}-{number}" for number in (1, 2, 3)]
    cleaner = subprocess.Popen(
        [sys.executable, "-c", _CLEANER, *names, switch],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _ip("netns", "add", switch)
        for bridge in ("first", "second"):
            _ip("-n", switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", switch, "link", "set", bridge, "up")
        yield Cluster(*(Host(prefix, switch, number) for number in (1, 2, 3)), folder)
    finally:
        assert cleaner.stdin is not None
        cleaner.stdin.close()
        cleaner.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done


def _until(condition: Callable[[], bool], seconds: float = _START_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
