"""Ranks on two hosts, whatever the hosts call themselves and whatever their names resolve to."""

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
    """Return what the driver hears that ranks have printed."""
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
def test_ranks_reduce_whatever_their_hosts_names_are(
    cluster: Cluster, names: tuple[str, str], address: str | None
) -> None:
    for host, name in zip((cluster.first, cluster.second), names, strict=True):
        host.rename(name, address)

    results = cluster.run(run_job)

    assert sorted(results, key=repr) == [
        (names[0], 1, 3.0, {cluster.first.address}),
        (names[1], 1, 3.0, {cluster.second.address}),
    ]


def test_the_driver_hears_what_ranks_print_on_other_hosts(cluster: Cluster) -> None:
    assert cluster.run(lines_of_ranks) == [(0, "hello\n"), (1, "hello\n")]


@pytest.mark.parametrize(
    "how", [({"HOROVOD_GLOO_IFACE": "six0"},), (None, ["bridge0", "six0"])], ids=["env", "nics"]
)
def test_ranks_reduce_over_ipv6_by_the_interface_that_is_named(
    cluster: Cluster, how: tuple[Any, ...]
) -> None:
    # No Spark is at home there: the interface has no IPv4 address.
    results = cluster.run(run_job, *how)

    used = {frozenset(addresses) for *_, addresses in results}
    assert used == {frozenset([cluster.first.only6]), frozenset([cluster.second.only6])}
    assert [total for _, _, total, _ in results] == [3.0, 3.0]


def test_a_network_that_does_not_lead_to_the_other_host_is_an_error_at_once(
    cluster: Cluster,
) -> None:
    with pytest.raises(UnreachableError, match=rf"\({SAME_ADDRESS}\) reaches .* nowhere"):
        cluster.run(run_job, None, "bridge0", timeout=50)


def test_an_interface_that_no_host_has_is_an_error_that_tells_those_that_it_has(
    cluster: Cluster,
) -> None:
    found = rf"nics=eth7 that is up .* eth0 \(.*{cluster.first.address}.*six0"
    with pytest.raises(UnreachableError, match=found):
        cluster.run(run_job, None, "eth7", timeout=50)
