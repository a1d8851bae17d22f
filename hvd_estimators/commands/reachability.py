"""Proof of which hosts reach each other: a listener on each host, and connections from the others.

An answer identifies its host, because an address such as Docker's ``172.17.0.1`` leads every host
to itself.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvd_estimators.launch.rendezvous.channel import Listener

_ATTEMPT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5
_NONCE_BYTES = 16


@contextlib.contextmanager
def listening(addresses: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Answer at addresses of this machine until the block ends.

    Yields the ``endpoints``, pairs of an address and a port, and the ``nonce`` of the answers.
    """
    nonce = secrets.token_hex(_NONCE_BYTES)
    listeners = []
    with contextlib.ExitStack() as stack:
        for address in addresses:
            with contextlib.suppress(OSError):
                listener = Listener(
                    address, lambda connection, _: connection.sendall(nonce.encode())
                )
                listeners.append(stack.enter_context(listener.listen()))
        yield {"endpoints": [(each.address, each.port) for each in listeners], "nonce": nonce}


def reached_addresses(
    hosts: Mapping[str, Mapping[str, Any]], seconds: float
) -> dict[str, list[str]]:
    """Return for each host the addresses that answered within a time limit."""
    deadline = time.monotonic() + seconds

    def is_reached(address: str, port: int, nonce: str) -> bool:
        while time.monotonic() < deadline:
            try:
                with socket.create_connection((address, port), _ATTEMPT_SECONDS) as connection:
                    return connection.recv(2 * _NONCE_BYTES).decode() == nonce
            except ConnectionRefusedError:
                # The listener existed before its address was sent, so this is another host.
                return False
            except OSError:
                time.sleep(_PAUSE_SECONDS)
        return False

    found: dict[str, list[str]] = {host: [] for host in hosts}
    tries = [(host, *place) for host, given in hosts.items() for place in given["endpoints"]]
    with ThreadPoolExecutor(max(len(tries), 1)) as pool:
        waiting = [
            (host, address, pool.submit(is_reached, address, port, hosts[host]["nonce"]))
            for host, address, port in tries
        ]
        for host, address, future in waiting:
            if future.result():
                found[host].append(address)
    return found
