"""Warm process: imports modules, and forks ranks on request. Linux only.

`hvd_estimators.launch.warm.client` starts the process, which runs a single thread. A fork keeps
only the forking thread, so that imported modules must not depend on threads that they have started.
OpenBLAS ends its threads before a fork and restarts them later. PyArrow's jemalloc has a similar
fork handler. If imports have started any other thread, the warm process does not fork ranks.

This module itself imports neither PySpark nor a framework.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_estimators.launch.warm.client import END, FORK, GO, HELLO, peer_of

NAME = "hvd-warm"
"""Name of the process in ``ps`` and ``top``."""

_REQUEST_SECONDS = 5.0
_LOOK_SECONDS = 5.0
# jemalloc restarts its thread in a fork.
_SURVIVORS = {"jemalloc_bg_thd"}
_NAME_FILE = Path("/proc/self/comm")


@dataclass(frozen=True)
class ForkSpec:
    """Parameters of the rank that a fork becomes.

    Attributes
    ----------
    directory : str
        The rank's directory, to which it writes its outcome.
    lifeline : int
        Descriptor of the pipe that closes when the rank must end.
    parent : int
        Descriptor (``pidfd``) of the process that waits for the rank.
    report : socket.socket
        Socket to which the rank's guardian sends its exit status.
    """

    directory: str
    lifeline: int
    parent: int
    report: socket.socket


def serve(settings: Mapping[str, Any]) -> ForkSpec:
    """Run the warm process. Returns only in forks, which must become ranks.

    Parameters
    ----------
    settings : mapping
        Parameters from `hvd_estimators.launch.warm.client.WarmStart`: descriptors of the listening
        socket and of the owners; modules; idle seconds.
    """
    if os.fork():
        os._exit(0)
    own_name = _NAME_FILE.read_text()
    _NAME_FILE.write_text(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listening = socket.socket(fileno=settings["listening"])
    server = _Server(listening, settings)
    try:
        server.prepare(settings["modules"])
        # This process need not wait for its guardians, because they report their status themselves.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        rank = server.run()
    except BaseException:
        os._exit(1)
    if rank is None:
        os._exit(0)
    _NAME_FILE.write_text(own_name)
    return rank


class _Server:
    def __init__(self, listening: socket.socket, settings: Mapping[str, Any]) -> None:
        self._listening = listening
        self._watched: list[int] = settings["watched"]
        self._idle_seconds: float = settings["idle_seconds"]
        self._refusal = b""
        self._is_ending = False

    def prepare(self, modules: list[str]) -> None:
        """Import modules, and check that they have left no threads."""
        # Imported objects stay alive; collecting garbage would take a fifth of the import time.
        gc.disable()
        for name in modules:
            # A rank that needs the module reports the error.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        threads = _threads_after_a_fork()
        if threads:
            self._refusal = f"imports have started threads: {', '.join(threads)}".encode()
        # The collector writes to objects that it visits, so that forks would copy their memory.
        gc.freeze()
        gc.enable()

    def run(self) -> ForkSpec | None:
        """Answer requests until idle or without owner; return the rank in a fork."""
        poller = select.poll()
        for descriptor in (self._listening.fileno(), *self._watched):
            poller.register(descriptor, select.POLLIN)
        last_use = time.monotonic()
        while time.monotonic() - last_use < self._idle_seconds and not self._is_ending:
            seconds = min(_LOOK_SECONDS, self._idle_seconds)
            ready = {descriptor for descriptor, _ in poller.poll(seconds * 1000)}
            if _has_children():
                last_use = time.monotonic()
            if ready & set(self._watched):
                break
            if self._listening.fileno() not in ready:
                continue
            connection, _ = self._listening.accept()
            with connection, contextlib.suppress(OSError):
                rank = self._answer(connection)
                if rank is not None:
                    return rank
            last_use = time.monotonic()
        return None

    def _answer(self, connection: socket.socket) -> ForkSpec | None:
        pid, user = peer_of(connection)
        if user != os.getuid():
            return None
        connection.settimeout(_REQUEST_SECONDS)
        connection.send(self._refusal or HELLO)
        if self._refusal:
            return None
        message, descriptors, _, _ = socket.recv_fds(connection, 16, 5)
        self._is_ending = message == END
        try:
            parent = os.pidfd_open(pid)
            descriptors.append(parent)
            forked = os.fork() if message == FORK and len(descriptors) == 6 else -1
        except BaseException:
            _close(descriptors)
            raise
        if forked:
            _close(descriptors)
            return None
        try:
            return self._become_rank(connection, *descriptors)
        except BaseException:
            with contextlib.suppress(OSError):
                os.write(descriptors[4], traceback.format_exc().encode())
            os._exit(1)

    def _become_rank(
        self,
        connection: socket.socket,
        written: int,
        call: int,
        lifeline: int,
        output: int,
        errors: int,
        parent: int,
    ) -> ForkSpec:
        os.setsid()
        connection.settimeout(_REQUEST_SECONDS)
        connection.send(str(os.getpid()).encode())
        if connection.recv(16) != GO:
            os._exit(1)
        os.lseek(written, 0, os.SEEK_SET)
        with open(written, "rb") as file:
            spec = json.load(file)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for source, target in ((call, 0), (output, 1), (errors, 2)):
            os.dup2(source, target)
        _close([call, output, errors, *self._watched])
        self._listening.close()
        _be_fresh(spec, lifeline)
        report = socket.socket(fileno=os.dup(connection.fileno()))
        return ForkSpec(spec["directory"], lifeline, parent, report)


def _be_fresh(spec: Mapping[str, Any], lifeline: int) -> None:
    """Set up this process as if it had just been started for a rank."""
    os.chdir(spec["cwd"])
    os.environ.clear()
    os.environ.update(spec["env"])
    sys.argv[1:] = [spec["directory"], str(lifeline)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.invalidate_caches()
    # NumPy's generator was seeded at import; Python reseeds its own generator in every fork.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    # Lightning reads the rank when it is imported, to print only on rank 0.
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None:
        rank_zero.rank_zero_only.rank = int(os.environ.get("RANK", "0"))
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def _threads_after_a_fork() -> list[str]:
    """Return the names of threads that forks would lose, though other code may wait for them."""
    # A trial fork makes libraries end the threads that they can restart after a fork.
    pid = os.fork()
    if not pid:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    names = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text().strip())
    return [name for name in names if name not in _SURVIVORS]


def _has_children() -> bool:
    """Return whether a guardian, and so its rank, still runs."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return True
    return False


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
