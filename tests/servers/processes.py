"""Processes of servers: started, waited for, never left behind, and heard when they fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_BYTES = 8000


class Server:
    """A process that ends with this one. What it prints goes to a file.

    Parameters
    ----------
    name : str
        For messages.
    command : sequence of str
        The program and its arguments. Its standard input is a pipe that `tell` writes to.
    output : Path
        The file, which is appended to.
    guarded : bool
        Whether to end it when its standard input closes; False for a program that does so itself.
    env : mapping, optional
        Environment variables on top of this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        output: Path,
        guarded: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.output = output
        guard = [sys.executable, "-I", str(_GUARD)] if guarded else []
        with open(output, "ab") as file:
            self._process = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the tests, which end it then.
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )

    def tell(self, word: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()

    def kill(self) -> None:
        """End it at once, as by SIGKILL, and wait until it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            # A forked process that hangs holds the other end as well. A guard ends what it guards.
            self._process.terminate()
            self._process.wait(20)

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        """Wait until a condition holds; where it does not, fail with the end of the output."""
        deadline = time.monotonic() + seconds
        while not condition():
            status = self._process.poll()
            late = time.monotonic() > deadline
            if late or status is not None:
                ended = "" if status is None else f", it has ended with status {status}"
                raise AssertionError(
                    f"{self.name} is not {what}{ended}. The end of its output:\n{self.tail()}"
                )
            time.sleep(0.05)

    def tail(self) -> str:
        """Return the end of what it has printed."""
        return self.output.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


def free_ports(number: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def answers(port: int) -> bool:
    """Return whether somebody listens on a port of 127.0.0.1."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
