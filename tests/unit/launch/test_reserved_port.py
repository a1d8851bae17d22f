"""A port that stays reserved until a process listens on it."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from typing import Any

import pytest

from hvd_estimators.launch.rendezvous import reserved_port
from hvd_estimators.launch.rendezvous.reserved_port import ReservedPort

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not kept")


def listening(port: int, address: str = "0.0.0.0", reuse: bool = True) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        made.bind((address, port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def restricted_to(port: int) -> socket.socket:
    """Return a socket to which the system may assign only one port."""
    made = socket.socket()
    ip_local_port_range = 51
    made.setsockopt(socket.IPPROTO_IP, ip_local_port_range, struct.pack("I", port << 16 | port))
    return made


def answers(port: int, address: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


@only_linux
@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::", "::1"])
def test_a_server_can_listen_on_it_repeatedly(address: str) -> None:
    with ReservedPort() as port:
        assert not answers(port.number)
        for _ in range(2):
            with listening(port.number, address):
                assert answers(port.number, "::1" if address == "::1" else "127.0.0.1")
            # The system still remembers the first server's connection.
            assert not answers(port.number)
    listening(port.number).close()


@only_linux
def test_a_second_server_or_one_without_reuseaddr_cannot_listen() -> None:
    with ReservedPort() as port:
        with pytest.raises(OSError, match="in use"):
            listening(port.number, reuse=False)
        with listening(port.number), pytest.raises(OSError, match="in use"):
            listening(port.number)


@only_linux
def test_the_system_assigns_it_to_no_other_program() -> None:
    """Neither for listening on port 0 nor for outgoing connections."""
    with ReservedPort() as port, listening(0) as server:
        with restricted_to(port.number) as made, pytest.raises(OSError, match="in use"):
            made.bind(("0.0.0.0", 0))
        with restricted_to(port.number) as made, pytest.raises(OSError, match="assign"):
            made.connect(("127.0.0.1", server.getsockname()[1]))
    with restricted_to(port.number) as made:
        made.bind(("0.0.0.0", 0))
        assert made.getsockname()[1] == port.number


@only_linux
def test_torch_can_listen_on_it_in_another_process() -> None:
    program = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
port = int(sys.argv[1])
for libuv in (True, False):
    server = TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=20), use_libuv=libuv)
    client = TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=20), use_libuv=libuv)
    server.set("key", "value")
    print(client.get("key").decode())
    del client, server
"""
    with ReservedPort() as port:
        done = subprocess.run(
            [sys.executable, "-c", program, str(port.number)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.split() == ["value", "value"], done.stderr


def test_without_ipv6_the_port_covers_all_ipv4_addresses(monkeypatch: Any) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with ReservedPort() as port:
        listening(port.number).close()


def test_on_other_systems_it_is_free_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(reserved_port, "PLATFORM", "darwin")
    with ReservedPort() as port:
        listening(port.number, reuse=False).close()
