"""Reservation of a TCP port for a process that will listen on it later. Runs in rank 0's parent."""

from __future__ import annotations

import contextlib
import socket

from typing_extensions import Self

from hvd_estimators._util.system import PLATFORM


class ReservedPort:
    """Free TCP port that the system gives to no other program; used as a context manager.

    A socket stays bound to the port on all addresses, and does not listen. On Linux, a process may
    listen on the port meanwhile if it sets ``SO_REUSEADDR``, as torch's ``TCPStore`` does. It may
    also close the port and listen again.

    Other systems do not allow this. There, the socket is closed at once, and the port is only
    unlikely to be taken.

    Attributes
    ----------
    number : int
        The port.
    """

    def __init__(self) -> None:
        self._socket = _bound_on_all_addresses()
        self.number = int(self._socket.getsockname()[1])
        if PLATFORM != "linux":
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()


def _bound_on_all_addresses() -> socket.socket:
    """Return a socket that is bound to a free port of all IPv6 and IPv4 addresses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return _bound(socket.AF_INET6, "::")
    return _bound(socket.AF_INET, "0.0.0.0")


def _bound(family: socket.AddressFamily, address: str) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, 0))
    except BaseException:
        bound.close()
        raise
    return bound
