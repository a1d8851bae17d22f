"""A task that cannot reach the task of rank 0."""

from __future__ import annotations

import socket

import pytest
from second_task import outcome_of_second_task

from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rendezvous import client
from hvd_estimators.launch.task.addresses import Host
from hvd_estimators.launch.timeouts import Patience


def outcome_of_task_1(
    monkeypatch: pytest.MonkeyPatch, port: int, first: Host, second: Host
) -> RankOutcome:
    """Return the outcome of the second task, whose rank 0 should listen on a port."""
    patience = Patience(attempt=0.2, refused=0.3, silence=0.5, pause=0.02, beat=10.0)
    monkeypatch.setattr(client, "Patience", lambda: patience)
    endpoints = [(address, port) for address in ["127.0.0.1", first.address]]
    return outcome_of_second_task(
        monkeypatch, first, second, endpoints, {}, one_machine=False, verbose=1
    )


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_the_error_names_both_hosts_and_nics(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    north = Host("1", "north", "127.0.0.2")
    south = Host("2", "south", "127.0.0.3")
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        if how == "silent":
            taken.listen()
        port = taken.getsockname()[1]
        outcome = outcome_of_task_1(monkeypatch, port, north, south)
    assert outcome.error_type == "UnreachableError"
    why = {"refused": "has refused connections for", "silent": "has not answered for"}[how]
    expected = "south (127.0.0.3) does not reach the task of rank 0 on north: rank 0 on north "
    assert outcome.error.startswith(expected + why)
    assert f"(at 127.0.0.2 port {port}: " in outcome.error
    assert "SparkBackend(nics='eth1')" in outcome.error


def test_on_one_host_rank_0_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Host("1", "north", "127.0.0.2")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        outcome = outcome_of_task_1(monkeypatch, taken.getsockname()[1], here, here)
    assert (outcome.error_type, outcome.lost) == ("lost", (0, "north"))
    assert "nics" not in outcome.error
