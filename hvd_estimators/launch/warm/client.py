"""Client of warm processes, which have imported a framework and fork ranks.

A warm process belongs to a Spark executor's Python, or to a process that uses `LocalBackend`. It
ends with its owner, or a minute after its last rank. Clients find it by an abstract socket, which
ends with the process. Each end checks that the other one belongs to the same user. The socket's
name contains the owner and a digest of everything that may affect imports: Python, environment,
working directory, mounts and modules.

The server is in `hvd_estimators.launch.warm.server`. Both use calls of Linux, see
`has_warm_start_calls`. If anything fails, the rank starts in a fresh process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import select
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_estimators._util.import_path import python_module
from hvd_estimators._util.process_identity import namespace_id, process_stat
from hvd_estimators._util.system import has_warm_start_calls
from hvd_estimators.exceptions import ParamError

WARM_START_VARIABLE = "HVD_ESTIMATORS_WARM_START"
"""Environment variable; ``0`` starts every rank in a fresh process."""

IDLE_VARIABLE = "HVD_ESTIMATORS_WARM_SECONDS"
"""Environment variable: the seconds without a rank after which a warm process ends; 0 for none."""

# An executor's memory limit counts the process, so it stays little longer than it takes to start
# the next fit of a loop.
_IDLE_SECONDS = 60.0

ANSWER_SECONDS = 10.0
"""Maximum seconds for answers that require at most a fork."""

HELLO, FORK, GO, END = b"hello", b"fork", b"go", b"end"
"""Messages between warm process and client."""

CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a socket, as Linux packs them."""

_SOCKETS = Path("/proc/net/unix")

# Imports from a slow disk take long.
_IMPORT_SECONDS = 120.0
_MOST_PROCESSES = 2

# Variables that differ between ranks, or between tests of pytest. No module reads them when it is
# imported, except Lightning, which forks number again.
_OF_A_RANK = re.compile(
    "HOROVOD_(?:RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|HOSTNAME|CONTROLLER)"
    "|HOROVOD_CPU_OPERATIONS"
    "|HOROVOD_GLOO_(?:RENDEZVOUS_ADDR|RENDEZVOUS_PORT|IFACE|TIMEOUT_SECONDS)|HOROVOD_TIMELINE"
    r"|HOROVOD_STALL_\w*|HVD_ESTIMATORS_\w*|\w*VISIBLE_DEVICES"
    "|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|(?:GROUP|ROLE)_(?:RANK|WORLD_SIZE)|ROLE_NAME"
    r"|NODE_RANK|MASTER_(?:ADDR|PORT)|TORCHELASTIC_\w*|(?:GLOO|NCCL)_SOCKET_IFNAME"
    "|PYTEST_CURRENT_TEST"
)

logger = logging.getLogger(__name__)


def connected(name: str) -> socket.socket:
    """Connect to the warm process with the given socket name.

    Raises
    ------
    OSError
        If there is none, or it belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(f"\0{name}")
        if peer_of(connection)[1] != os.getuid():
            raise PermissionError("another user's process has the name of the warm process")
        return connection
    except BaseException:
        connection.close()
        raise


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process ID and the user ID of the other end of a socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, user, _ = CREDENTIALS.unpack(packed)
    return pid, user


class ForkedRank:
    """A guardian forked by a warm process, with the interface of `subprocess.Popen`.

    Parameters
    ----------
    pid : int
        The guardian's process ID.
    connection : socket.socket
        Only the guardian holds the other end, and sends its status through it before it ends.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status of the process, or None while it runs."""
        return self._wait_for_status(0)

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended, because its ID may have been reused."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return its exit status."""
        status = self._wait_for_status(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a rank", timeout)
        return status

    def _wait_for_status(self, seconds: float | None) -> int | None:
        if self._status is not None:
            return self._status
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        if not poller.poll(None if seconds is None else seconds * 1000):
            return None
        try:
            answer = self._connection.recv(4)
        except OSError:
            answer = b""
        # A killed guardian sends no status; 9 is SIGKILL.
        status = struct.unpack("i", answer)[0] if len(answer) == 4 else 9
        self._await_end()
        self._connection.close()
        self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def _await_end(self) -> None:
        """Wait until the other end closes, which happens when the guardian ends."""
        self._connection.settimeout(ANSWER_SECONDS)
        with contextlib.suppress(OSError):
            self._connection.recv(1)


def allows_warm_start(env: Mapping[str, str]) -> bool:
    """Return whether the system and the given environment allow warm starts."""
    is_allowed = env.get(WARM_START_VARIABLE, "1") != "0" and idle_seconds(env) > 0
    return has_warm_start_calls() and is_allowed


def idle_seconds(env: Mapping[str, str]) -> float:
    """Return the seconds after which idle warm processes end, for ranks with an environment.

    Raises
    ------
    ParamError
        If the variable is not a number of seconds.
    """
    text = env.get(IDLE_VARIABLE) or str(_IDLE_SECONDS)
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise ParamError(f"{IDLE_VARIABLE}: expected seconds, such as 600, found {text!r}.")
    return float(text)


def warm_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a rank's environment that modules may read when they are imported."""
    return {name: value for name, value in env.items() if not _OF_A_RANK.fullmatch(name)}


@dataclass(frozen=True)
class WarmStart:
    """Start of ranks as forks of a warm process.

    Attributes
    ----------
    modules : sequence of str
        The modules that the warm process imports. Modules that cannot be imported are skipped.
    owners : sequence of int
        Process IDs of the owners. The warm process ends when any of them ends.
    idle_seconds : float
        Seconds without ranks and requests after which the warm process ends.
    """

    modules: Sequence[str]
    owners: Sequence[int]
    idle_seconds: float = _IDLE_SECONDS

    @classmethod
    def of_executor(cls, modules: Sequence[str], env: Mapping[str, str]) -> WarmStart:
        """Return a warm start owned by Spark's Python daemon and the executor's JVM."""
        parent = os.getppid()
        above = process_stat(parent)
        # Without a daemon, the JVM starts Python itself.
        owners = [parent] if above.name == "java" else [parent, above.parent]
        return cls(modules, owners, idle_seconds(env))

    def prepare(self, executable: str, env: Mapping[str, str]) -> None:
        """Start the warm process, if none exists, so that it imports modules in advance."""
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            self._connect(executable, env).close()

    def fork(
        self, executable: str, env: Mapping[str, str], directory: str, files: Sequence[int]
    ) -> ForkedRank | None:
        """Start a rank; on failure, log a warning and return None.

        Parameters
        ----------
        executable : str
            The Python executable.
        env : mapping
            The rank's environment.
        directory : str
            The rank's directory, the argument of its main program.
        files : sequence of int
            Descriptors: the call to read, the lifeline, standard output and standard error.
        """
        try:
            return self._fork(executable, env, directory, files)
        except (OSError, ValueError, EOFError, subprocess.SubprocessError) as error:
            logger.warning(
                "A rank starts in a fresh process, which takes longer: no warm process (%s: %s)",
                type(error).__name__,
                error,
            )
            return None

    def _fork(
        self, executable: str, env: Mapping[str, str], directory: str, files: Sequence[int]
    ) -> ForkedRank:
        spec = {"env": dict(env), "cwd": os.getcwd(), "directory": directory}
        with _sent(spec) as written, contextlib.ExitStack() as stack:
            connection = stack.enter_context(self._connect(executable, env))
            connection.settimeout(_IMPORT_SECONDS)
            greeting = connection.recv(4096)
            if greeting != HELLO:
                raise EOFError(greeting.decode(errors="replace") or "it has ended")
            connection.settimeout(ANSWER_SECONDS)
            socket.send_fds(connection, [FORK], [written, *files])
            answer = connection.recv(4096)
            # A signal to process 0 would reach this process and its group.
            if not answer.isdigit() or int(answer) < 2:
                raise EOFError(answer.decode(errors="replace") or "it has ended")
            # The fork waits for this message, so that an abandoned rank never starts.
            connection.send(GO)
            stack.pop_all()
            return ForkedRank(int(answer), connection)

    def _connect(self, executable: str, env: Mapping[str, str]) -> socket.socket:
        """Connect to the warm process for a rank; start it if none exists."""
        name = self._name(executable, env)
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return connected(name)
            # Otherwise another process starts it at this moment.
            with contextlib.suppress(OSError):
                self._start(name, executable, warm_environment(env))
        return connected(name)

    def _start(self, name: str, executable: str, env: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listening.bind(f"\0{name}")
            listening.listen(64)
            self._make_room(name)
            watched = []
            for pid in self.owners:
                watched.append(os.pidfd_open(pid))
                stack.callback(os.close, watched[-1])
            if not name.startswith(self._owner_prefix()):
                raise ProcessLookupError("its owner has ended")
            command = python_module("hvd_estimators.launch.rank.worker", executable)
            settings = {
                "listening": listening.fileno(),
                "name": name,
                "watched": watched,
                "idle_seconds": self.idle_seconds,
                "modules": list(self.modules),
            }
            process = subprocess.Popen(
                [*command, "--warm", json.dumps(settings)],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(listening.fileno(), *watched),
                start_new_session=True,
            )
        # The warm process continues in a fork that is not a child of this process.
        process.wait(_IMPORT_SECONDS)

    def _make_room(self, name: str) -> None:
        """End the owner's other warm processes if there are more than one of them."""
        prefix = f"@{self._owner_prefix()}"
        listed = {line.rpartition(" ")[2] for line in _SOCKETS.read_text().splitlines()}
        others = {each[1:] for each in listed if each.startswith(prefix)} - {name}
        for other in others if len(others) >= _MOST_PROCESSES else ():
            with contextlib.suppress(OSError), connected(other) as connection:
                connection.recv(4096)  # its greeting, which fails on a closed connection
                connection.send(END)

    def _owner_prefix(self) -> str:
        return f"hvd-estimators-{self.owners[0]}.{process_stat(self.owners[0]).started}-"

    def _name(self, executable: str, env: Mapping[str, str]) -> str:
        facts = [executable, sorted(warm_environment(env).items()), os.getcwd()]
        # Containers may share a network, and so the names of sockets.
        facts += [namespace_id("pid"), namespace_id("mnt")]
        document = json.dumps([*facts, list(self.modules), list(self.owners), self.idle_seconds])
        digest = hashlib.sha256(document.encode("utf-8", "surrogateescape")).hexdigest()
        return f"{self._owner_prefix()}{digest[:32]}"


@contextlib.contextmanager
def _sent(spec: Mapping[str, object]) -> Iterator[int]:
    """Write the specification of a rank to an in-memory file, and yield its descriptor."""
    written = os.memfd_create("hvd-estimators-rank")
    try:
        with open(written, "w", encoding="utf-8", errors="surrogateescape", closefd=False) as file:
            json.dump(spec, file)
        yield written
    finally:
        os.close(written)
