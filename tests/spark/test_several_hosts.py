"""Ranks on two hosts with arbitrary host names and name resolution."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from two_hosts import SAME_ADDRESS, Cluster

from hvd_estimators.exceptions import UnreachableError

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.once]


@pytest.fixture
def cluster(two_hosts: Cluster) -> Cluster:
    return two_hosts


def sum_over_ranks() -> tuple[str, int, float, set[str]]:
    """Return the host's name, its number of ranks, the sum, and the addresses of connections."""
    import horovod.torch as hvd
    import psutil
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    used = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "ESTABLISHED"}
    return socket.gethostname(), hvd.local_size(), float(total), used - {"127.0.0.1"}


def run_job(
    env: dict[str, str | None] | None = None, nics: Any = None
) -> list[tuple[str, int, float, set[str]]]:
    from hvd_estimators.launch.spark_backend import SparkBackend

    return SparkBackend(2, env=env, nics=nics).run(sum_over_ranks)


def lines_of_ranks() -> list[tuple[int, str]]:
    """Return the lines of ranks that reach the driver."""
    from hvd_estimators.launch import SparkBackend

    heard: list[Any] = []
    SparkBackend(2, verbose=2).run(print, ["hello"], on_event=heard.append)
    return sorted((event.rank, event.line) for event in heard)


@pytest.mark.parametrize(
    ("names", "address"),
    [
        (("nowhere1", "nowhere2"), None),
        (("debian1", "debian2"), "127.0.1.1"),
        (("docker1", "docker2"), SAME_ADDRESS),
        (("same", "same"), None),
        (("same", "same"), "127.0.1.1"),
    ],
    ids=["unresolvable", "127.0.1.1", "another interface", "equal", "equal and 127.0.1.1"],
)
def test_ranks_reduce_with_any_host_names(
    cluster: Cluster, names: tuple[str, str], address: str | None
) -> None:
    for host, name in zip((cluster.first, cluster.second), names, strict=True):
        host.rename(name, address)

    results = cluster.run(run_job)

    assert sorted(results, key=repr) == [
        (names[0], 1, 3.0, {cluster.first.address}),
        (names[1], 1, 3.0, {cluster.second.address}),
    ]


def test_output_of_ranks_on_other_hosts_reaches_the_driver(cluster: Cluster) -> None:
    assert cluster.run(lines_of_ranks) == [(0, "hello\n"), (1, "hello\n")]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(({"HOROVOD_GLOO_IFACE": "six0"},), id="env", marks=pytest.mark.soak),
        pytest.param((None, ["eth7", "six0"]), id="nics"),
    ],
)
def test_ranks_reduce_over_the_named_ipv6_interface(cluster: Cluster, how: tuple[Any, ...]) -> None:
    # Spark does not use this interface, which has no IPv4 address.
    results = cluster.run(run_job, *how)

    used = {frozenset(addresses) for *_, addresses in results}
    assert used == {frozenset([cluster.first.only6]), frozenset([cluster.second.only6])}
    assert [total for _, _, total, _ in results] == [3.0, 3.0]


def sum_in_process_group() -> tuple[float, str, str, set[str]]:
    """Return the sum over torch's ranks, two variables, and the addresses of connections."""
    import os

    import psutil
    import torch

    torch.distributed.init_process_group("gloo")
    total = torch.tensor([torch.distributed.get_rank() + 1.0])
    torch.distributed.all_reduce(total)
    connections = psutil.Process().net_connections()
    used = {
        c.laddr.ip for c in connections if c.status == "ESTABLISHED" and c.family == socket.AF_INET6
    }
    place = os.environ["MASTER_ADDR"], f"{os.environ['LOCAL_RANK']} {os.environ['GROUP_RANK']}"
    torch.distributed.barrier()
    return float(total), *place, used


def run_process_group(nics: str) -> list[tuple[float, str, str, set[str]]]:
    from hvd_estimators.launch.spark_backend import SparkBackend

    return SparkBackend(2, nics=nics).run(sum_in_process_group)


def test_torchrun_programs_connect_over_ipv6(cluster: Cluster) -> None:
    """Connect without resolvable host names, and with pretended GPUs."""
    results = cluster.run(run_process_group, "six0")

    addresses = [cluster.first.only6, cluster.second.only6]
    assert [total for total, *_ in results] == [3.0, 3.0]
    assert results[0][1] == results[1][1]
    assert results[0][1] in addresses
    # Spark has assigned a GPU to each rank, which sees only this one, as number 0 of a node.
    assert [place for _, _, place, _ in results] == ["0 0", "0 1"]
    assert all(used & set(addresses) for *_, used in results)


def test_an_interface_without_a_route_between_hosts_fails_at_once(cluster: Cluster) -> None:
    with pytest.raises(UnreachableError, match=rf"\({SAME_ADDRESS}\); .*nics='eth1'"):
        cluster.run(run_job, None, "bridge0", timeout=50)


def test_unknown_interfaces_are_reported_with_the_hosts_interfaces(cluster: Cluster) -> None:
    found = rf"nics=eth7 with an address .* eth0 \(.*{cluster.first.address}.*six0"
    with pytest.raises(UnreachableError, match=found):
        cluster.run(run_job, None, "eth7", timeout=50)
