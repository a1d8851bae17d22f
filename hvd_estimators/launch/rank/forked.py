"""A rank that a warm process has forked, seen from the process that asked for it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess

__all__ = ["ANSWER_SECONDS", "ForkedRank"]

ANSWER_SECONDS = 10.0
"""How long what only takes a fork may take."""


class ForkedRank:
    """A guardian that a warm process has forked, as `subprocess.Popen` shows a child.

    Parameters
    ----------
    pid : int
        Its id.
    connection : socket.socket
        It holds the other end alone, and sends its status there before it ends.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return how the process ended, or None."""
        return self._look(0)

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended: its id may be another one's then."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return how."""
        status = self._look(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a rank", timeout)
        return status

    def _look(self, seconds: float | None) -> int | None:
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
        # Who is killed tells nothing.
        status = struct.unpack("i", answer)[0] if len(answer) == 4 else 9
        self._await_end()
        self._connection.close()
        self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def _await_end(self) -> None:
        """Wait until the other end is closed, which the guardian does as its very last act."""
        self._connection.settimeout(ANSWER_SECONDS)
        with contextlib.suppress(OSError):
            self._connection.recv(1)
