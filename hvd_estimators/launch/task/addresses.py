"""Addresses of hosts: each task offers its host's addresses, and all tasks choose the same ones.

Host names are not sufficient. Two hosts can have the same name, and a host often resolves its own
name to an address that no other host reaches. So a host's first address is the one by which Spark
knows it. If this is no address of the machine, the first one is on the route to the driver. Each
task then proves it, by connecting to the task of rank 0. Runs in the tasks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from hvd_estimators._util.process_identity import boot_id, namespace_id
from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch.rendezvous.channel import LOOPBACK
from hvd_estimators.launch.rendezvous.gloo_http import INTERFACE_VARIABLE

NICS_HINT = (
    "Open all TCP ports between these hosts, or name the interfaces that lead to them: "
    f"SparkBackend(nics='eth1'), or {INTERFACE_VARIABLE}=eth1 in each executor's environment."
)
"""Remedy for hosts that do not reach each other."""


def host_identity() -> str:
    """Return a string that two processes share exactly if they share a loopback interface.

    The string combines the machine's boot ID, the network namespace and the host name. Systems
    without namespaces have the addresses of their interfaces instead.
    """
    network = namespace_id("net")
    if not network:
        addresses = [a.address for entries in psutil.net_if_addrs().values() for a in entries]
        network = " ".join(sorted(set(addresses)))
    return f"{boot_id()} {network} {socket.gethostname()}"


def executor_identity() -> str:
    """Return a string that two tasks of a host share exactly if they share an executor.

    The string combines the YARN container ID, if any, the PID namespace, and the ID of the process
    that forks the executor's Python workers. Runs in a task.
    """
    return f"{os.environ.get('CONTAINER_ID', '')} {namespace_id('pid')} {os.getppid()}"


def route_address(host: str) -> str:
    """Return this machine's address on the route to another host; empty if unknown."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def candidate_addresses(
    preferred: str = "", driver: str = "", interfaces: Sequence[str] = (), setting: str = "nics"
) -> list[str]:
    """Return the addresses at which other machines may reach this one, the likeliest first.

    All of them are addresses of this machine, because Gloo must listen on the chosen one.

    Parameters
    ----------
    preferred : str
        The name or address by which the cluster knows this machine. Its addresses come first, if
        they are addresses of this machine.
    driver : str
        A host whose route is used if `preferred` names no address of this machine.
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
    interface_addresses = {
        name: [a.address for a in entries if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }
    down = {name for name, stats in psutil.net_if_stats().items() if not stats.isup}
    names = interfaces or [name for name in interface_addresses if name not in down]
    addresses = [
        address
        for name in names
        for address in interface_addresses.get(name, [])
        if _is_open(address)
    ]
    if not addresses:
        existing = ", ".join(
            f"{name} ({', '.join(entries)})"
            for name, entries in sorted(interface_addresses.items())
            if entries
        )
        selection = f" of {setting}={', '.join(interfaces)}" if interfaces else ""
        raise UnreachableError(
            f"{socket.gethostname()} is one of several hosts and cannot be reached from the "
            f"others: expected an interface{selection} that is up and has an address other than a "
            f"loopback or a link-local one; found {existing or 'none'}."
        )
    first = _resolved(preferred) & set(addresses) or {route_address(driver)}
    return sorted(dict.fromkeys(addresses), key=lambda a: (a not in first, _rank(a)))


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


@dataclass(frozen=True)
class HostAddresses:
    """Identity and addresses of a task's host, as sent to the other tasks.

    Attributes
    ----------
    identity : str
        Equal for two tasks if and only if they reach each other at the loopback address.
    name : str
        The host's name, for messages.
    executor : str
        Equal for two tasks of a host if and only if they belong to the same executor.
    addresses : list of str
        Numeric addresses at which the host may be reachable, the likeliest first.
    error : str
        Reason if there are no addresses; empty otherwise.
    """

    identity: str
    name: str
    executor: str
    addresses: list[str]
    error: str = ""


def this_host(
    preferred: str, driver: str, interfaces: Sequence[str], setting: str
) -> HostAddresses:
    """Return this host's `candidate_addresses`, or the error, with its identity."""
    addresses, problem = [], ""
    try:
        addresses = candidate_addresses(preferred, driver, interfaces, setting)
    except UnreachableError as error:
        # This is not an error if all tasks run on one host.
        problem = str(error)
    return HostAddresses(
        host_identity(), socket.gethostname(), executor_identity(), addresses, problem
    )


def choose_addresses(hosts: Sequence[HostAddresses]) -> tuple[list[str], list[str]]:
    """Choose an address of each task's host. All tasks make the same choice.

    Parameters
    ----------
    hosts : sequence of HostAddresses
        The host of each task, in task order.

    Returns
    -------
    list of str
        Name of each task's host, unique for each host.
    list of str
        Numeric address of each task's host. All addresses are IPv4, or all are IPv6, because Gloo
        only connects addresses of one kind. If there is only one host, this is the loopback
        address.

    Raises
    ------
    UnreachableError
        If there are no such addresses.
    """
    distinct = {host.identity: host for host in reversed(hosts)}
    if len(distinct) == 1:
        return [_url_safe(hosts[0].name)] * len(hosts), [LOOPBACK] * len(hosts)
    errors = [host.error for host in distinct.values() if host.error]
    if errors:
        raise UnreachableError(" ".join(errors))
    # An address of several hosts, such as Docker's 172.17.0.1, leads each of them to itself.
    count = Counter(address for host in distinct.values() for address in host.addresses)
    chosen: dict[str, str] = {}
    for is_ipv6 in sorted((False, True), key=lambda kind: kind != (":" in hosts[0].addresses[0])):
        for host in distinct.values():
            of_kind = [a for a in host.addresses if (":" in a) == is_ipv6 and count[a] == 1]
            if of_kind:
                chosen.setdefault(host.identity, of_kind[0])
        if len(chosen) == len(distinct):
            break
        chosen.clear()
    if not chosen:
        found = "; ".join(
            f"{host.name} ({', '.join(host.addresses)})" for host in distinct.values()
        )
        raise UnreachableError(
            "Ranks on several hosts connect to each other at addresses of one kind (IPv4 or IPv6) "
            f"that no other host has. There are none: found {found}. {NICS_HINT}"
        )
    names = Counter(_url_safe(host.name) for host in distinct.values())
    labels = {
        identity: name if names[name] == 1 else _url_safe(f"{name}-{chosen[identity]}")
        for identity, name in ((i, _url_safe(host.name)) for i, host in distinct.items())
    }
    identities = [host.identity for host in hosts]
    return [labels[each] for each in identities], [chosen[each] for each in identities]


def _url_safe(name: str) -> str:
    """Return a host name that is safe to use in a URL."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", name) or "host"
