"""Host identity of a process, and addresses at which other machines may reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch.versions import ADDRESS_VARIABLE

__all__ = [
    "INTERFACE_VARIABLE",
    "LOOPBACK",
    "candidate_addresses",
    "executor_identity",
    "host_identity",
    "listening_environment",
]

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLE = "HOROVOD_GLOO_IFACE"
"""Environment variable of Horovod: the network interface to use."""


def host_identity() -> str:
    """Return a string that two processes share exactly if they share a loopback interface.

    The string combines the machine's boot ID, the network namespace and the host name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        # Without /proc, for example not on Linux, use the interfaces' addresses instead.
        macs = [a.address for found in psutil.net_if_addrs().values() for a in found]
        boot, network = "", " ".join(sorted(set(macs)))
    return f"{boot} {network} {socket.gethostname()}"


def executor_identity() -> str:
    """Return a string that two tasks of a host share exactly if they share an executor.

    The string combines the YARN container ID, if any, the PID namespace, and the ID of the process
    that forks the executor's Python workers. Runs in a task.
    """
    namespace = ""
    with contextlib.suppress(OSError):  # not on Linux
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{os.environ.get('CONTAINER_ID', '')} {namespace} {os.getppid()}"


def candidate_addresses(
    preferred: str = "", interfaces: Sequence[str] = (), setting: str = "nics"
) -> list[str]:
    """Return the addresses at which other machines may reach this one, the likeliest first.

    All of them are addresses of this machine, because Gloo must listen on the chosen one.

    Parameters
    ----------
    preferred : str
        The name or address by which the cluster knows this machine. Its addresses come first, if
        they are addresses of this machine.
    interfaces : sequence of str
        The names of the network interfaces to use; names that this machine does not have are
        ignored. Default: all interfaces that are up.
    setting : str
        The name of the setting with the interfaces, for the error.

    Raises
    ------
    UnreachableError
        If there is no such address.
    """
    found = {
        name: [a.address for a in entries if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }
    down = {name for name, stats in psutil.net_if_stats().items() if not stats.isup}
    names = interfaces or [name for name in found if name not in down]
    addresses = [address for name in names for address in found.get(name, []) if _is_open(address)]
    if not addresses:
        having = ", ".join(f"{n} ({', '.join(a)})" for n, a in sorted(found.items()) if a)
        named = f"{setting}={', '.join(interfaces)}"
        wanted = f"an interface of {named} that" if interfaces else "an interface that"
        raise UnreachableError(
            f"{socket.gethostname()} is one of several hosts and cannot be reached from the "
            f"others: expected {wanted} is up and has an address other than a loopback or a "
            f"link-local one; found {having or 'none'}."
        )
    first = _resolved(preferred)
    return sorted(dict.fromkeys(addresses), key=lambda a: (a not in first, _rank(a)))


def listening_environment(address: str) -> dict[str, str]:
    """Return the variables that make a rank's Gloo listen on one of this machine's addresses."""
    # The first is for Horovod built by `hvd-estimators build-horovod`, the second for other builds.
    return {ADDRESS_VARIABLE: address, INTERFACE_VARIABLE: _interface_of(address)}


def _is_open(address: str) -> bool:
    """Return whether an address may be reachable from other machines, through any interface."""
    if "%" in address:  # link-local, with an interface
        return False
    parsed = ipaddress.ip_address(address)
    is_local = parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast
    return not is_local and not (parsed.version == 6 and parsed.is_link_local)


def _rank(address: str) -> tuple[bool, bool]:
    parsed = ipaddress.ip_address(address)
    return parsed.version == 6, parsed.is_link_local


def _resolved(name: str) -> set[str]:
    """Return the addresses that a name resolves to on this machine; an address is its own."""
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)} if name else set()
    except OSError:
        return set()


def _interface_of(address: str) -> str:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return "lo"
