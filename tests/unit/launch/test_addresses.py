"""Grouping tasks by host and choosing an address for each host."""

import dataclasses
import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank.outcome import RankOutcome, results_in_order
from hvd_estimators.launch.rendezvous.gloo_http import listening_environment
from hvd_estimators.launch.task import addresses
from hvd_estimators.launch.task.addresses import (
    HostCandidates,
    ProbeListener,
    agree,
    candidate_addresses,
    choose,
    executor_identity,
    host_identity,
)


def host(*addresses, name="node"):
    return HostCandidates(name, name, [(address, 1) for address in addresses], "nonce")


class TestChoice:
    def test_the_first_address_that_all_others_reach_is_chosen(self):
        hosts = {
            "a": host("10.0.0.1", "10.1.0.1"),
            "b": host("10.1.0.2"),
            "c": host("10.1.0.3"),
        }
        reports = {
            "a": {"b": ["10.1.0.2"], "c": ["10.1.0.3"]},
            "b": {"a": ["10.1.0.1", "10.0.0.1"], "c": ["10.1.0.3"]},
            "c": {"a": ["10.1.0.1"], "b": ["10.1.0.2"]},
        }

        assert choose(hosts, reports) == {"a": "10.1.0.1", "b": "10.1.0.2", "c": "10.1.0.3"}

    def test_earlier_candidates_are_preferred_among_reachable_addresses(self):
        hosts = {"a": host("10.0.0.1", "10.1.0.1"), "b": host("10.0.0.2", "10.1.0.2")}
        reports = {"a": {"b": ["10.1.0.2", "10.0.0.2"]}, "b": {"a": ["10.1.0.1", "10.0.0.1"]}}

        assert choose(hosts, reports) == {"a": "10.0.0.1", "b": "10.0.0.2"}

    def test_all_addresses_are_of_one_family(self):
        hosts = {"a": host("10.0.0.1", "fd00::1"), "b": host("fd00::2")}
        reports = {"a": {"b": ["fd00::2"]}, "b": {"a": ["10.0.0.1", "fd00::1"]}}

        assert choose(hosts, reports) == {"a": "fd00::1", "b": "fd00::2"}

    def test_the_error_names_the_hosts_that_cannot_reach_each_other(self):
        hosts = {
            "a": host("10.0.0.1", name="north"),
            "b": host("10.0.0.2", "fd00::2", name="south"),
            "c": host("10.0.0.3", name="west"),
        }
        reports = {
            "a": {"b": ["fd00::2"], "c": ["10.0.0.3"]},
            "b": {"a": ["10.0.0.1"], "c": ["10.0.0.3"]},
            "c": {"a": ["10.0.0.1"], "b": []},
        }

        with pytest.raises(UnreachableError) as raised:
            choose(hosts, reports)

        lines = str(raised.value).splitlines()
        assert "north (10.0.0.1) reaches south (10.0.0.2, fd00::2) at fd00::2 only." in lines
        assert "west (10.0.0.3) reaches south (10.0.0.2, fd00::2) nowhere." in lines
        assert "nics='eth1'" in lines[-1]
        assert "HOROVOD_GLOO_IFACE" in lines[-1]

    @given(st.data())
    def test_chosen_addresses_are_reached_by_all_others(self, data):
        number = data.draw(st.integers(2, 5))
        hosts = {
            str(index): host(f"10.0.0.{index}", f"10.1.0.{index}", f"fd00::{index + 1}")
            for index in range(number)
        }
        reports = {
            reporter: {
                other: data.draw(st.lists(st.sampled_from(hosts[other].addresses())))
                for other in hosts
                if other != reporter
            }
            for reporter in hosts
        }
        try:
            chosen = choose(hosts, reports)
        except UnreachableError:
            # Neither address family gives every host an address that all others reached.
            for is_6 in (False, True):
                assert any(
                    not any(
                        (":" in address) == is_6
                        and all(address in reports[o][name] for o in hosts if o != name)
                        for address in hosts[name].addresses()
                    )
                    for name in hosts
                )
        else:
            assert len({":" in address for address in chosen.values()}) == 1
            for name, address in chosen.items():
                assert all(address in reports[o][name] for o in hosts if o != name)


class Hosts:
    """Tasks in threads, each on a separate host with an address 127.x.y.z of this machine."""

    def __init__(self, *given):
        self.listeners = [ProbeListener(addresses) for addresses in given]
        self.candidates = [
            dataclasses.replace(listener.candidates(), identity=str(task), name="node")
            for task, listener in enumerate(self.listeners)
        ]

    def agree(self):
        texts, all_told = [""] * len(self.candidates), threading.Barrier(len(self.candidates))

        def run(task):
            def exchange(found):
                texts[task] = json.dumps(found)
                all_told.wait(30)
                return [json.loads(text) for text in texts]

            return agree(self.candidates, task, exchange)

        with ThreadPoolExecutor(len(self.candidates)) as pool:
            for listener in self.listeners:
                listener.__enter__()
            try:
                futures = [pool.submit(run, task) for task in range(len(self.candidates))]
                return [future.result() for future in futures]
            finally:
                for listener in self.listeners:
                    listener.__exit__(None, None, None)


class TestAgreement:
    def test_all_tasks_agree_on_the_same_addresses(self):
        found = Hosts(["127.0.0.1"], ["127.0.0.2"], ["127.0.0.3"]).agree()

        assert found[0] == found[1] == found[2]
        assert found[0][1] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]

    def test_hosts_with_the_same_name_are_distinguished(self):
        found = Hosts(["127.0.0.1"], ["127.0.0.2"]).agree()

        assert found[0][0] == ["node-127.0.0.1", "node-127.0.0.2"]

    def test_an_address_answered_by_a_stranger_is_not_used(self):
        hosts = Hosts(["127.0.0.1", "127.0.0.9"], ["127.0.0.2"])
        elsewhere = ProbeListener(["127.0.0.4"])
        first = hosts.candidates[0]
        wrong = elsewhere.candidates().endpoints[0]
        hosts.candidates[0] = dataclasses.replace(first, endpoints=[wrong, *first.endpoints])

        with elsewhere:
            found = hosts.agree()

        assert found[0][1] == ["127.0.0.1", "127.0.0.2"]

    def test_a_silent_address_is_given_up_after_the_timeout(self, monkeypatch):
        monkeypatch.setattr(timeouts, "PROBES", 1.0)
        with socket.socket() as silent:
            # Accepts connections but never sends anything.
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            hosts = Hosts([], ["127.0.0.2"])
            hosts.candidates[0] = dataclasses.replace(
                hosts.candidates[0], endpoints=[silent.getsockname()]
            )
            with pytest.raises(UnreachableError, match=r"reaches node .* nowhere"):
                hosts.agree()

    def test_tasks_on_one_host_need_not_reach_each_other(self):
        hosts = Hosts(["127.0.0.1"], ["127.0.0.2"], ["127.0.0.3"])
        # The first task answers for both tasks of its host.
        second = dataclasses.replace(hosts.candidates[1], identity="0", endpoints=[])
        hosts.candidates[1] = second

        found = hosts.agree()

        assert found[0] == found[1] == found[2]
        assert found[0][1] == ["127.0.0.1", "127.0.0.1", "127.0.0.3"]

    def test_tasks_on_one_host_use_the_loopback_and_exchange_nothing(self):
        with ProbeListener(["127.0.0.1"]) as first, ProbeListener([], "no network") as second:
            candidates = [first.candidates(), second.candidates()]
            names, addresses = agree(candidates, 0, exchange=None)

        assert addresses == ["127.0.0.1", "127.0.0.1"]
        assert names[0] == names[1]

    def test_a_host_without_an_address_fails_all_tasks(self):
        hosts = Hosts(["127.0.0.1"], [])
        hosts.candidates[1] = dataclasses.replace(hosts.candidates[1], error="it has no network")

        with pytest.raises(UnreachableError, match="it has no network"):
            hosts.agree()

    def test_the_driver_raises_the_error_of_the_tasks(self):
        failed = RankOutcome(0, "node", None, "UnreachableError", "a reaches b nowhere")

        with pytest.raises(UnreachableError, match="a reaches b nowhere"):
            results_in_order([failed, failed])


class TestCandidates:
    @pytest.fixture
    def machine(self, monkeypatch):
        """A machine with every kind of address."""

        def inet(address):
            kind = socket.AF_INET6 if ":" in address else socket.AF_INET
            return SimpleNamespace(family=kind, address=address)

        interfaces = {
            "lo": ["127.0.0.1", "::1"],
            "wlan0": ["169.254.3.4"],
            "eth0": ["fd00::5", "fe80::1%eth0", "10.0.0.5"],
            "eth1": ["10.1.0.5"],
            "eth2": ["10.2.0.5"],
        }
        found = {name: [inet(a) for a in entries] for name, entries in interfaces.items()}
        found["eth0"].append(SimpleNamespace(family=psutil.AF_LINK, address="00:16:3e:00:00:01"))
        up = {name: SimpleNamespace(isup=name != "eth2") for name in interfaces}
        monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: found)
        monkeypatch.setattr(addresses.psutil, "net_if_stats", lambda: up)

    @pytest.mark.usefixtures("machine")
    def test_candidates_are_reachable_addresses_with_ipv4_first(self):
        assert candidate_addresses() == ["10.0.0.5", "10.1.0.5", "169.254.3.4", "fd00::5"]

    @pytest.mark.usefixtures("machine")
    def test_the_clusters_address_comes_first_if_it_belongs_to_this_machine(self):
        assert candidate_addresses("10.1.0.5")[0] == "10.1.0.5"
        assert candidate_addresses("fd00::5")[0] == "fd00::5"
        assert candidate_addresses("fd00:0::5")[0] == "fd00::5"
        assert candidate_addresses("192.0.2.1") == candidate_addresses()
        assert candidate_addresses("a-name-that-is.invalid") == candidate_addresses()

    @pytest.mark.usefixtures("machine")
    def test_only_the_requested_interfaces_are_used(self):
        assert candidate_addresses("10.1.0.5", ["eth0"]) == ["10.0.0.5", "fd00::5"]
        assert "10.1.0.5" in candidate_addresses(interfaces=["eth0", "eth1", "eth7"])
        with pytest.raises(UnreachableError, match=r"IFACE=eth7.*eth1 \(10\.1\.0\.5\)"):
            candidate_addresses("", ["eth7"], "HOROVOD_GLOO_IFACE")
        with pytest.raises(UnreachableError, match=r"nics=eth7, lo that is up"):
            candidate_addresses(interfaces=["eth7", "lo"])

    @pytest.mark.usefixtures("machine")
    def test_the_environment_of_a_rank_names_its_address_and_interface(self):
        assert listening_environment("10.1.0.5") == {
            "HVD_ESTIMATORS_GLOO_ADDRESS": "10.1.0.5",
            "HOROVOD_GLOO_IFACE": "eth1",
            "GLOO_SOCKET_IFNAME": "eth1",
        }


def test_an_executor_is_identified_by_its_process_and_yarn_container(monkeypatch):
    monkeypatch.delenv("CONTAINER_ID", raising=False)
    identity = executor_identity()
    assert executor_identity() == identity

    # Containers on one machine share its name, its network and often its process IDs.
    monkeypatch.setenv("CONTAINER_ID", "container_1_0001_01_000002")
    assert executor_identity() != identity
    monkeypatch.delenv("CONTAINER_ID")
    assert executor_identity() == identity

    parent = addresses.os.getppid()
    monkeypatch.setattr(addresses.os, "getppid", lambda: parent + 1)
    assert executor_identity() != identity


def test_a_host_identity_is_shared_within_a_host_and_differs_between_hosts(
    monkeypatch,
):
    identity = host_identity()
    print_identity = "from hvd_estimators.launch.task.addresses import *; print(host_identity())"
    elsewhere = subprocess.run(
        [sys.executable, "-c", print_identity], capture_output=True, text=True
    )
    assert elsewhere.stdout.strip() == identity, elsewhere.stderr

    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "elsewhere")
    assert host_identity() != identity
    monkeypatch.undo()
    # A container with a separate network, on the same machine and with the same name.
    monkeypatch.setattr(addresses, "namespace_id", lambda kind: f"{kind}:[1]")
    assert host_identity() != identity
    # A system without namespaces uses the addresses of its interfaces.
    monkeypatch.setattr(addresses, "namespace_id", lambda kind: "")
    without = host_identity()
    assert "127.0.0.1" in without
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: {})
    assert host_identity() not in (identity, without)
