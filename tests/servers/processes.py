"""Server processes: starting, waiting, ending, and reporting their output on failures."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_BYTES = 8000
_random = random.SystemRandom()  # tests seed the other one


class Server:
    """Process that ends with this one, with its output in a file.

    Parameters
    ----------
    name : str
        Name in messages.
    command : sequence of str
        The program and its arguments. Its standard input is a pipe that `tell` writes to.
    output : Path
        The file, to which output is appended.
    guarded : bool
        Whether to end it when its standard input closes; False for a program that does so itself.
    env : mapping, optional
        Environment variables in addition to this process's.
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
                # Ctrl-C must reach only the tests, which then end the process.
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )

    def tell(self, word: str) -> None:
        """Write a line to the process's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            # A hanging forked process also holds the other end. A guard ends its command.
            self._process.terminate()
            self._process.wait(20)

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        """Wait until a condition holds; if it never does, fail with the end of the output."""
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
        """Return the end of the process's output."""
        return self.output.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


def free_ports(number: int) -> list[int]:
    """Return unused ports of 127.0.0.1.

    They are not among those that Linux assigns to connections (32,768 and more). A server may start
    seconds later, and a port of these may be taken then.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < number:
            bound = stack.enter_context(socket.socket())
            port = _random.randrange(10_000, 30_000)
            with contextlib.suppress(OSError):
                bound.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def answers(port: int) -> bool:
    """Return whether a port of 127.0.0.1 accepts connections."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
