"""Addresses of hosts: each task offers its host's address, and each of several hosts needs one.

Host names are not sufficient. Two hosts can have the same name, and a host often resolves its own
name to an address that no other host reaches. So a host's address is the one by which Spark knows
it. If this is no address of the machine, it is the one on the route to the driver. Each task then
proves it, by connecting to the task of rank 0. Runs in the tasks.
"""

from __future__ import annotations

import contextlib
import ipaddress
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


def route_address(host: str) -> str:
    """Return this machine's address on the route to another host; empty if unknown."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def own_address(preferred: str, driver: str, interfaces: Sequence[str], setting: str) -> str:
    """Return the address at which other machines probably reach this one.

    It is an address of this machine, because Gloo must listen on it.

    Parameters
    ----------
    preferred : str
        The name or address by which the cluster knows this machine.
    driver : str
        A host whose route is used if `preferred` names no address of this machine.
    interfaces : sequence of str
        The names of the network interfaces to use; names that this machine does not have are
        ignored. Default: all interfaces.
    setting : str
        The name of the setting with the interfaces, for the error.

    Raises
    ------
    UnreachableError
        If there is no such address.
    """
    existing = {
        name: [a.address for a in entries if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }
    names = interfaces or list(existing)
    usable = [a for name in names for a in existing.get(name, []) if _is_open(a)]
    wanted = [*_resolved(preferred), route_address(driver)]
    # Of several addresses of an interface, the first one of IPv4.
    wanted += sorted(usable, key=lambda address: ":" in address) if interfaces else []
    for address in wanted:
        if address in usable:
            return address
    selection = f" of {setting}={', '.join(interfaces)}" if interfaces else ""
    found = "; ".join(f"{name} ({', '.join(of)})" for name, of in sorted(existing.items()) if of)
    raise UnreachableError(
        f"{socket.gethostname()} is one of several hosts and cannot be reached from the others: "
        f"expected an interface{selection} with an address by which Spark or the driver reaches "
        f"it, other than a loopback or a link-local one; found {found or 'none'}. {NICS_HINT}"
    )


def _is_open(address: str) -> bool:
    """Return whether an address may be reachable from other machines, through any interface."""
    if "%" in address:  # link-local, with an interface
        return False
    parsed = ipaddress.ip_address(address)
    is_local = parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast
    return not is_local and not (parsed.version == 6 and parsed.is_link_local)


def _resolved(name: str) -> list[str]:
    """Return the addresses that a name resolves to on this machine; an address is its own."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None)] if name else []
    except OSError:
        return []


@dataclass(frozen=True)
class Host:
    """Identity and address of a task's host, as sent to the other tasks.

    Attributes
    ----------
    identity : str
        Equal for two tasks if and only if they reach each other at the loopback address.
    name : str
        The host's name, for messages.
    address : str
        Numeric address at which the host is probably reachable.
    error : str
        Reason if there is no address; empty otherwise.
    """

    identity: str
    name: str
    address: str
    error: str = ""


def this_host(preferred: str, driver: str, interfaces: Sequence[str], setting: str) -> Host:
    """Return this host's `own_address`, or the error, with its identity."""
    address = problem = ""
    try:
        address = own_address(preferred, driver, interfaces, setting)
    except UnreachableError as error:
        # This is not an error if all tasks run on one host.
        problem = str(error)
    return Host(host_identity(), socket.gethostname(), address, problem)


def names_and_addresses(hosts: Sequence[Host]) -> tuple[list[str], list[str]]:
    """Return a name and an address of each task's host. All tasks get the same result.

    Parameters
    ----------
    hosts : sequence of Host
        The host of each task, in task order.

    Returns
    -------
    list of str
        Name of each task's host, unique for each host.
    list of str
        Numeric address of each task's host. If there is only one host, this is the loopback
        address.

    Raises
    ------
    UnreachableError
        If a host has no address, or the addresses cannot connect the hosts.
    """
    distinct = {host.identity: host for host in reversed(hosts)}
    if len(distinct) == 1:
        return [_url_safe(hosts[0].name)] * len(hosts), [LOOPBACK] * len(hosts)
    errors = [host.error for host in distinct.values() if host.error]
    if errors:
        raise UnreachableError(" ".join(errors))
    addresses = {host.address for host in distinct.values()}
    if len(addresses) < len(distinct) or len({":" in address for address in addresses}) > 1:
        found = "; ".join(f"{host.name} ({host.address})" for host in distinct.values())
        raise UnreachableError(
            "Ranks on several hosts connect to each other at addresses of one kind (IPv4 or IPv6) "
            f"that no other host has; found {found}. {NICS_HINT}"
        )
    names = Counter(_url_safe(host.name) for host in distinct.values())
    labels = {
        host.identity: name if names[name] == 1 else _url_safe(f"{name}-{host.address}")
        for host, name in ((each, _url_safe(each.name)) for each in distinct.values())
    }
    identities = [host.identity for host in hosts]
    return [labels[each] for each in identities], [distinct[each].address for each in identities]


def _url_safe(name: str) -> str:
    """Return a host name that is safe to use in a URL."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", name) or "host"
