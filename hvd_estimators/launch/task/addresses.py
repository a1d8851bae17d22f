"""Address discovery: find an address of each host that all other hosts of a job can reach.

Host names are not sufficient. Two hosts can have the same name, and a host often resolves its own
name to an address that no other host reaches. So a task offers all addresses at which its host
might be reachable. Every host connects to the addresses of every other host, and one that answered
to all of them is chosen. An answer identifies its host, because an address such as Docker's
``172.17.0.1`` leads every host to itself. Runs in the tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import psutil

from hvd_estimators._util.process_identity import boot_id, namespace_id
from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import BACKLOG, bound_socket
from hvd_estimators.launch.rendezvous.gloo_http import INTERFACE_VARIABLE, LOOPBACK

_NONCE_BYTES = 16


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
    first = _resolved(preferred)
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
class HostCandidates:
    """Identity and candidate addresses of a task's host, as sent to the other tasks.

    Attributes
    ----------
    identity : str
        Equal for two tasks if and only if they reach each other at the loopback address.
    name : str
        The host's name, for messages.
    endpoints : list of (str, int)
        Numeric addresses at which the host might be reachable, and the ports that answer there.
    nonce : str
        The content of the answers.
    error : str
        Reason if there are no addresses; empty otherwise.
    executor : str
        Equal for two tasks of a host if and only if they belong to the same executor.
    """

    identity: str
    name: str
    endpoints: list[tuple[str, int]]
    nonce: str
    error: str = ""
    executor: str = ""

    def addresses(self) -> list[str]:
        """Return the addresses without the ports."""
        return [address for address, _ in self.endpoints]


class ProbeListener:
    """Listener that answers connections to this host's addresses until the block ends.

    Parameters
    ----------
    addresses : sequence of str
        Addresses to listen on; those that cannot be bound are left out.
    error : str
        Reason for missing addresses.
    """

    def __init__(self, addresses: Sequence[str], error: str = "") -> None:
        self._error = error
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self._sockets: list[socket.socket] = []
        for address in addresses:
            with contextlib.suppress(OSError):
                listening = bound_socket(address)
                listening.listen(BACKLOG)
                listening.setblocking(False)
                self._sockets.append(listening)
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._answer, daemon=True)

    @classmethod
    def on_this_host(cls, preferred: str, interfaces: Sequence[str], setting: str) -> Self:
        """Return a listener on this host's `candidate_addresses`."""
        try:
            return cls(candidate_addresses(preferred, interfaces, setting))
        except UnreachableError as error:
            # This is not an error if all tasks run on one host.
            return cls([], str(error))

    def candidates(self) -> HostCandidates:
        """Return the candidates to send to the other tasks."""
        endpoints = [s.getsockname()[:2] for s in self._sockets]
        name, executor = socket.gethostname(), executor_identity()
        return HostCandidates(host_identity(), name, endpoints, self._nonce, self._error, executor)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.close()
        self._thread.join()
        for listening in [*self._sockets, self._stopped]:
            listening.close()

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listening in [*self._sockets, self._stopped]:
                selector.register(listening, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._stopped:
                        return
                    # The client may have disconnected already.
                    with contextlib.suppress(OSError):
                        connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                        with connection:
                            connection.setblocking(False)
                            connection.send(self._nonce.encode())


def agree(
    candidates: Sequence[HostCandidates],
    task: int,
    exchange: Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]],
) -> tuple[list[str], list[str]]:
    """Agree with all other tasks on the addresses at which the tasks are reached.

    Parameters
    ----------
    candidates : sequence of HostCandidates
        Candidates of each task, in task order, with their listeners running.
    task : int
        The number of this task.
    exchange : callable
        All-gathers one message per task, in task order. Called only if there are several hosts.

    Returns
    -------
    list of str
        Name of each task's host, unique for each host.
    list of str
        Numeric address at which all others reach each task's host. All addresses are IPv4, or all
        are IPv6. If there is only one host, this is the loopback address.

    Raises
    ------
    UnreachableError
        In all tasks, if a host cannot reach another host.
    """
    # The first task of each host probes for all tasks of that host.
    first_tasks: dict[str, int] = {}
    for number, host in enumerate(candidates):
        first_tasks.setdefault(host.identity, number)
    hosts = {identity: candidates[first] for identity, first in first_tasks.items()}
    if len(hosts) == 1:
        count = len(candidates)
        return [_url_safe(candidates[0].name)] * count, [LOOPBACK] * count
    errors = [host.error for host in hosts.values() if host.error]
    if errors:
        raise UnreachableError(" ".join(errors))
    own = candidates[task].identity
    other_hosts = {identity: host for identity, host in hosts.items() if identity != own}
    reports = exchange(
        asyncio.run(reached_addresses(other_hosts if first_tasks[own] == task else {}))
    )
    chosen = choose(hosts, {identity: reports[first] for identity, first in first_tasks.items()})
    names = [_url_safe(host.name) for host in hosts.values()]
    labels = {
        identity: name if names.count(name) == 1 else _url_safe(f"{name}-{chosen[identity]}")
        for identity, name in zip(hosts, names, strict=True)
    }
    identities = [host.identity for host in candidates]
    return [labels[each] for each in identities], [chosen[each] for each in identities]


def choose(
    hosts: Mapping[str, HostCandidates], reports: Mapping[str, Mapping[str, Sequence[str]]]
) -> dict[str, str]:
    """Choose an address for each host.

    Parameters
    ----------
    hosts : mapping of str to HostCandidates
        Candidates of each host, by its identity.
    reports : mapping
        For each host, the addresses that it reached of each other host.

    Raises
    ------
    UnreachableError
        If a host has no address that all others reached. Gloo only connects addresses of the same
        kind, so all of them must be IPv4, or all IPv6.
    """
    common = {
        host: [
            address
            for address in candidates.addresses()
            if all(address in reports[other].get(host, ()) for other in hosts if other != host)
        ]
        for host, candidates in hosts.items()
    }
    for version in (4, 6):
        # The first address of the version is the last one that is set.
        chosen = {
            host: address
            for host, addresses in common.items()
            for address in addresses[::-1]
            if ipaddress.ip_address(address).version == version
        }
        if len(chosen) == len(hosts):
            return chosen
    raise UnreachableError(_describe_failure(hosts, reports, common))


def _describe_failure(
    hosts: Mapping[str, HostCandidates],
    reports: Mapping[str, Mapping[str, Sequence[str]]],
    common: Mapping[str, Sequence[str]],
) -> str:
    titles = {
        host: f"{candidates.name} ({', '.join(candidates.addresses())})"
        for host, candidates in hosts.items()
    }
    lines = []
    for host, addresses in common.items():
        if addresses:
            lines.append(f"{titles[host]} is reached by all others at {', '.join(addresses)}.")
            continue
        for other in hosts:
            if other != host:
                reached = reports[other].get(host, ())
                where = f"at {', '.join(reached)} only" if reached else "nowhere"
                lines.append(f"{titles[other]} reaches {titles[host]} {where}.")
    return (
        "Ranks connect to each other at any TCP port, and have to listen on addresses of one kind "
        "(IPv4 or IPv6) at which all other hosts reach them. There are none:\n"
        + "\n".join(lines)
        + "\nOpen the network between these hosts, or name the interfaces that lead to it: "
        f"SparkBackend(nics='eth1'), or {INTERFACE_VARIABLE}=eth1 in each executor's environment"
    )


async def reached_addresses(
    hosts: Mapping[str, HostCandidates], seconds: float | None = None
) -> dict[str, list[str]]:
    """Return for each host the addresses that answered.

    Parameters
    ----------
    hosts : mapping of str to HostCandidates
        The hosts, by identity.
    seconds : float, optional
        Time limit. Default: the one of launches.
    """
    clock, ended = asyncio.get_running_loop().time, asyncio.Event()
    attempts = {
        asyncio.ensure_future(_reach(address, port, candidates.nonce, ended)): (host, address)
        for host, candidates in hosts.items()
        for address, port in candidates.endpoints
    }
    reached: dict[str, list[str]] = {host: [] for host in hosts}
    deadline = clock() + (timeouts.PROBES if seconds is None else seconds)
    is_shorter = False
    waiting = set(attempts)
    while waiting and clock() < deadline:
        done, waiting = await asyncio.wait(
            waiting, timeout=deadline - clock(), return_when=asyncio.FIRST_COMPLETED
        )
        for attempt in done:
            host, address = attempts[attempt]
            if attempt.result():
                reached[host].append(address)
        if not is_shorter and all(reached.values()):
            is_shorter, deadline = True, min(deadline, clock() + timeouts.PROBES_AFTER_SUCCESS)
    # Before Python 3.12, wait_for() loses a cancellation that arrives as the awaited task ends.
    ended.set()
    for attempt in waiting:
        attempt.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return reached


async def _reach(address: str, port: int, nonce: str, ended: asyncio.Event) -> bool:
    """Return whether the host with a nonce answers; retry until it does, or ``ended`` is set."""
    while not ended.is_set():
        try:
            answer = await asyncio.wait_for(_answer_of(address, port), timeouts.PROBE_ATTEMPT)
            return answer == nonce.encode()
        except ConnectionRefusedError:
            # The listener existed before its address was sent, so this is another host.
            return False
        except (TimeoutError, OSError):
            await asyncio.sleep(timeouts.PROBE_PAUSE)
    return False


async def _answer_of(address: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        return await reader.read(2 * _NONCE_BYTES)
    finally:
        writer.close()


def _url_safe(name: str) -> str:
    """Return a host name that is safe to use in a URL."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", name) or "host"
