"""Who is which rank, and the server over which ranks find each other and tell of failures.

Horovod's Gloo controller finds its peers through an HTTP key-value store whose address every rank
gets in its environment (``HOROVOD_GLOO_RENDEZVOUS_ADDR``, ``…_PORT``). The same store carries one
more key, by which a rank's parent tells the others that it failed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import psutil
from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from typing_extensions import Self

__all__ = ["Rendezvous", "Server", "assign_ranks", "child_environment", "rank_environment", "serve"]

_LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Rendezvous:
    """Where the rendezvous server listens; goes to every task.

    Attributes
    ----------
    address : str
        The host's address, reachable from all ranks.
    port : int
        Its TCP port.
    """

    address: str
    port: int

    def tell_failure(self) -> None:
        """Tell all ranks' parents that a rank failed."""
        self._put("abort")

    def failure_told(self) -> bool:
        """Return whether a rank has failed, or the server has gone."""
        return self._has("abort", if_unreachable=True)

    def tell_done(self, rank: int) -> None:
        """Tell the server's task that a rank needs the server no more."""
        self._put(f"done-{rank}")

    def done_told(self, rank: int) -> bool:
        """Return whether a rank needs the server no more."""
        return self._has(f"done-{rank}", if_unreachable=False)

    def _put(self, key: str) -> None:
        request = urllib.request.Request(self._url(key), data=b"1", method="PUT")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS),
        ):
            pass

    def _has(self, key: str, if_unreachable: bool) -> bool:
        try:
            with urllib.request.urlopen(self._url(key), timeout=_TIMEOUT_SECONDS):
                return True
        except urllib.error.HTTPError:
            return False
        except OSError:
            return if_unreachable

    def _url(self, key: str) -> str:
        return f"http://{self.address}:{self.port}/hvd_estimators/{key}"


def assign_ranks(hosts: Sequence[str]) -> list[SlotInfo]:
    """Give each task a rank, contiguous on each host.

    Parameters
    ----------
    hosts : sequence of str
        The host of each task.

    Returns
    -------
    list of SlotInfo
        Each task's slot, in the order of the tasks. Task 0 has rank 0.
    """
    names = list(dict.fromkeys(hosts))
    slots = get_host_assignments(
        [HostInfo(name, hosts.count(name)) for name in names], len(hosts), len(hosts)
    )
    waiting = {name: iter([s for s in slots if s.hostname == name]) for name in names}
    return [next(waiting[host]) for host in hosts]


class Server:
    """Horovod's rendezvous server on this machine; listens until the block ends.

    Ranks may come to it only when `expect` has told it of them.
    """

    def __enter__(self) -> Self:
        self._server = RendezvousServer()
        self.port = int(self._server.start())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop()
        self._server._httpd.server_close()

    def expect(self, slots: Sequence[SlotInfo]) -> None:
        """Tell the server which ranks will come.

        Not by its ``init()``, which also forgets what has been said to it before.
        """
        self._server._httpd._extract_scope_size(sorted(slots, key=lambda slot: slot.rank))


@contextlib.contextmanager
def serve(slots: Sequence[SlotInfo], address: str) -> Iterator[Rendezvous]:
    """Run a rendezvous server for ranks that are known beforehand until the block ends."""
    with Server() as server:
        server.expect(slots)
        yield Rendezvous(address, server.port)


def rank_environment(slot: SlotInfo, rendezvous: Rendezvous) -> dict[str, str]:
    """Return the environment variables that make a process one rank of a Gloo job."""
    return {
        **create_slot_env_vars(slot),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous.port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": _interface_towards(rendezvous.address),
    }


def child_environment(
    base: Mapping[str, str], *overlays: Mapping[str, str | None] | None
) -> dict[str, str]:
    """Lay environments over each other; None deletes a variable."""
    env: dict[str, str | None] = dict(base)
    for overlay in overlays:
        env.update(overlay or {})
    return {name: str(value) for name, value in env.items() if value is not None}


def python_path(*paths: Sequence[str]) -> str:
    """Join import paths for ``PYTHONPATH``, each once."""
    merged = dict.fromkeys(path for group in paths for path in group if path)
    return os.pathsep.join(merged)


def _interface_towards(address: str) -> str:
    """Return the name of the network interface by which this machine reaches an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only chooses a route.
        probe.connect((address, 9))
        local = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == local for entry in addresses):
            return name
    return "lo"
