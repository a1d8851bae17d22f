"""Committed states of an elastic job: sent by rank 0, kept on the driver, fetched by new ranks.

They travel as messages of `hvd_estimators.launch.network.channel`, a state in parts of some
megabytes, so that neither end holds a whole one as bytes. The driver keeps them in files that have
no name, which nobody else can open and which go with the process.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any

from typing_extensions import Self

from hvd_estimators.exceptions import StoreError, UnreachableError
from hvd_estimators.launch.elastic.state_pickle import StatePickler
from hvd_estimators.launch.network.channel import AuthenticationError, Channel, new_secret
from hvd_estimators.launch.network.listener import Listener
from hvd_estimators.unpickling import load

__all__ = ["COMMITS_VARIABLE", "CommitStore", "commit", "fetch"]

COMMITS_VARIABLE = "HVD_ESTIMATORS_COMMITS"
"""Environment variable that tells ranks where commits are kept: ``host:port:secret``."""

_PART_BYTES = 4 * 2**20
_CONNECT_SECONDS = 10.0
# The driver's disk may be slow, and a rank may serialise for long between two parts.
_SECONDS = 120.0
# How long a rank tries again where the driver cannot be reached.
_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.5


class CommitStore:
    """The last commits of a job's states. Runs on the driver; used as a context manager.

    Attributes
    ----------
    count : int
        How many commits have been made.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._files: dict[int, IO[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()

    @contextlib.contextmanager
    def serve(self, host: str) -> Iterator[dict[str, str]]:
        """Serve the ranks of one launch until the block ends; those of an earlier one no more.

        All ranks fetch what was committed before this launch.

        Parameters
        ----------
        host : str
            The address at which ranks reach this machine.

        Yields
        ------
        dict
            Environment variables for the ranks.
        """
        secret = new_secret()
        ended = threading.Event()
        before = dict(self._files)

        def serve(connection: socket.socket, proved: Callable[[], None]) -> None:
            channel = Channel.accept(connection, secret, _CONNECT_SECONDS)
            proved()
            message, _ = channel.receive(_SECONDS, _SECONDS)
            if message["kind"] == "fetch":
                _send_file(channel, before.get(message["state"]))
            else:
                self._keep(channel, message["state"], ended)

        with Listener.at_host(host, serve) as listener:
            listener.listen()
            try:
                yield {COMMITS_VARIABLE: f"{listener.place}:{secret.hex()}"}
            finally:
                with self._lock:
                    ended.set()

    def _keep(self, channel: Channel, state: int, ended: threading.Event) -> None:
        """Receive a state, and let it take the place of the one before when it is complete."""
        file: IO[bytes] = _unnamed_file()
        problem = ""
        while True:
            message, body = channel.receive(_SECONDS, _SECONDS)
            if message["kind"] == "end":
                break
            try:
                file.write(b"" if problem else body)
            except OSError as error:
                problem = str(error)
                file.close()
                file = io.BytesIO()
        try:
            file.flush()
        except OSError as error:
            problem = str(error)
        if problem:
            folder = tempfile.gettempdir()
            channel.send({"kind": "refused", "why": f"{folder}: {problem}"}, seconds=_SECONDS)
            return
        with self._lock:
            if ended.is_set():
                return
            self._files[state] = file
            self.count += 1
        channel.send({"kind": "kept"}, seconds=_SECONDS)


def _unnamed_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="hvd-estimators-commit-")


def _send_file(channel: Channel, file: IO[bytes] | None) -> None:
    if file is None:
        channel.send({"kind": "none"})
        return
    channel.send({"kind": "found"}, seconds=_SECONDS)
    place = 0
    # Other ranks read from the same file.
    while part := os.pread(file.fileno(), _PART_BYTES, place):
        channel.send({"kind": "part"}, part, _SECONDS)
        place += len(part)
    channel.send({"kind": "end"}, seconds=_SECONDS)


def commit(target: str, state: int, value: Any) -> None:
    """Send a state to the driver; returns when it is kept there. Runs on the worker.

    Parameters
    ----------
    target : str
        What `COMMITS_VARIABLE` holds.
    state : int
        The state's number in the job.
    value
        What is sent with cloudpickle.

    Raises
    ------
    StoreError
        If the driver cannot keep it.
    UnreachableError
        If the driver cannot be reached.
    """

    def send(channel: Channel) -> None:
        channel.send({"kind": "commit", "state": state}, seconds=_SECONDS)
        parts = _Parts(channel)
        StatePickler(parts, protocol=5).dump(value)
        parts.end()
        answer, _ = channel.receive(_SECONDS, _SECONDS)
        if answer["kind"] != "kept":
            raise StoreError(
                f"The driver cannot keep what was committed ({answer['why']}). Set TMPDIR there to "
                "a folder with more room."
            )

    _talk(target, send)


def fetch(target: str, state: int) -> Any:
    """Return what a state's last commit held before this launch; None if there is none.

    Runs on the worker. Takes and raises what `commit` does.
    """

    def receive(channel: Channel) -> Any:
        channel.send({"kind": "fetch", "state": state}, seconds=_SECONDS)
        answer, _ = channel.receive(_SECONDS, _SECONDS)
        if answer["kind"] == "none":
            return None
        return load(io.BufferedReader(_Stream(channel), 2**20))

    return _talk(target, receive)


def _talk(target: str, talk: Callable[[Channel], Any]) -> Any:
    """Talk to the driver on a new connection, and from the start where it breaks."""
    host, port, secret = target.rsplit(":", 2)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            with socket.create_connection((host, int(port)), _CONNECT_SECONDS) as connection:
                return talk(Channel.connect(connection, bytes.fromhex(secret), _CONNECT_SECONDS))
        except StoreError:
            raise
        except OSError as error:
            if isinstance(error, AuthenticationError) or time.monotonic() > deadline:
                raise UnreachableError(
                    f"The driver, which keeps what ranks commit, cannot be reached at {host} port "
                    f"{port}: {error}"
                ) from error
        time.sleep(_PAUSE_SECONDS)


class _Parts:
    """A file to write to, whose bytes are sent in parts."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting = bytearray()

    def write(self, data: Any) -> int:
        # pickle writes large arrays as they are.
        with pickle.PickleBuffer(data).raw() as view:
            for start in range(0, len(view), _PART_BYTES):
                self._waiting += view[start : start + _PART_BYTES]
                if len(self._waiting) >= _PART_BYTES:
                    self._send()
            return len(view)

    def end(self) -> None:
        self._send()
        self._channel.send({"kind": "end"}, seconds=_SECONDS)

    def _send(self) -> None:
        self._channel.send({"kind": "part"}, bytes(self._waiting), _SECONDS)
        self._waiting.clear()


class _Stream(io.RawIOBase):
    """The bytes of a state that comes in parts."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._part = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._part:
            message, body = self._channel.receive(_SECONDS, _SECONDS)
            if message["kind"] == "end":
                return 0
            self._part = memoryview(body)
        count = min(len(buffer), len(self._part))
        buffer[:count] = self._part[:count]
        self._part = self._part[count:]
        return count
