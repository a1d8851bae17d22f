"""Spark application in a separate process, whose driver runs functions of tests.

The suite's session is one application with one master; a cluster needs another application. Run
as a program, this file is the driver.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import cloudpickle

__all__ = ["Application", "Job", "application"]

_GUARD = Path(__file__).with_name("guard.py")
_START_SECONDS = 120.0
_END_SECONDS = 20.0


class Job:
    """Function call in the driver."""

    def __init__(self, connection: Connection, logs: Callable[[], str]) -> None:
        self._connection, self._logs = connection, logs

    def result(self, timeout: float = 120.0) -> Any:
        """Return the call's result, or raise its error."""
        if not self._connection.poll(timeout):
            raise TimeoutError(f"the job did not end in {timeout} s\n{self._logs()}")
        kind, value = cloudpickle.loads(self._connection.recv_bytes())
        if kind == "error":
            raise value
        return value


class Application:
    """A driver with a Spark session.

    Attributes
    ----------
    folder : Path
        The application's folder.
    log : Path
        The driver's log: its standard output and error, and Spark's.
    """

    def __init__(self, connection: Connection, folder: Path, logs: Callable[[], str]) -> None:
        self._connection, self._logs = connection, logs
        self.folder, self.log = folder, folder / "driver.log"

    def submit(self, fn: Callable[..., Any], *args: Any) -> Job:
        """Start ``fn(*args)`` in the driver, where the session is active; one at a time."""
        self._connection.send_bytes(cloudpickle.dumps((fn, args)))
        return Job(self._connection, self._logs)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> Any:
        """Return the result of ``fn(*args)`` in the driver."""
        return self.submit(fn, *args).result(timeout)


@contextlib.contextmanager
def application(
    folder: Path,
    conf: Mapping[str, str],
    env: Mapping[str, str] | None = None,
    start: Callable[[Sequence[str], Path, Mapping[str, str]], subprocess.Popen[bytes]]
    | None = None,
    logs: Callable[[], str] | None = None,
) -> Iterator[Application]:
    """Run an application until the block, or this process, ends.

    Parameters
    ----------
    folder : Path
        Existing folder for its files.
    conf : mapping
        Spark's configuration, including ``spark.master``.
    env : mapping, optional
        Environment variables of the driver in addition to this process's.
    start : callable, optional
        Starts a command elsewhere, given a file for its output and its environment variables.
    logs : callable, optional
        Returns text for error messages. Default: the end of the driver's output.
    """
    log = folder / "driver.log"
    logs = logs or (lambda: log.read_text(errors="replace")[-8000:])
    # The path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="hvd-driver-") as place:
        address = f"{place}/socket"
        settings = [f"{name}={value}" for name, value in conf.items()]
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen(1)
            listening.settimeout(0.1)
            variables = {"PYSPARK_PYTHON": sys.executable, **(env or {})}
            # -P keeps this folder out of the import path.
            command = [sys.executable, "-P", __file__, address, *settings]
            process = (start or _start)(command, log, variables)
            connection: Connection | None = None
            try:
                connection = _accept(listening, process, logs)
                yield Application(connection, folder, logs)
            finally:
                if connection is not None:
                    connection.close()
                _end(process)


def _start(command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, even if this process is killed."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-I", str(_GUARD), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )


def _accept(
    listening: socket.socket, process: subprocess.Popen[bytes], logs: Callable[[], str]
) -> Connection:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        assert process.poll() is None, logs()
        assert time.monotonic() < deadline, logs()
        with contextlib.suppress(TimeoutError):
            connected, _ = listening.accept()
            connected.setblocking(True)
            return Connection(connected.detach())


def _end(process: subprocess.Popen[bytes]) -> None:
    for further in (process.terminate, process.kill):
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            further()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _serve(address: str, *settings: str) -> None:
    """Run the driver: call the received functions, one after the other."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.config("spark.ui.enabled", "false")
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    with Client(address) as connection, contextlib.suppress(EOFError):
        while True:
            fn, args = cloudpickle.loads(connection.recv_bytes())
            try:
                answer = cloudpickle.dumps(("result", fn(*args)))
            except BaseException as error:
                answer = cloudpickle.dumps(("error", error))
            connection.send_bytes(answer)
    spark.stop()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
