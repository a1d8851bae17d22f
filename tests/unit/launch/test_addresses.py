"""Grouping tasks by host and choosing an address of each host."""

import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch.rendezvous.gloo_http import listening_environment
from hvd_estimators.launch.task import addresses
from hvd_estimators.launch.task.addresses import (
    Host,
    host_identity,
    names_and_addresses,
    own_address,
)


def host(address, name="node", identity=None, error=""):
    return Host(identity or address, name, address, error)


class TestHosts:
    def test_each_host_has_one_address(self):
        hosts = [host("fd00::1"), host("fd00::2"), host("fd00::3", identity="fd00::1")]

        assert names_and_addresses(hosts)[1] == ["fd00::1", "fd00::2", "fd00::1"]

    def test_the_error_names_hosts_addresses_and_nics(self):
        shared = [
            host("172.17.0.1", name="north", identity="1"),
            host("172.17.0.1", name="south", identity="2"),
        ]
        other_kinds = [host("10.0.0.1", name="north"), host("fd00::2", name="south")]

        for hosts in (shared, other_kinds):
            with pytest.raises(UnreachableError, match=r"nics='eth1'.*HOROVOD_GLOO_IFACE") as found:
                names_and_addresses(hosts)
            for each in hosts:
                assert f"{each.name} ({each.address})" in str(found.value)

    def test_hosts_with_the_same_name_are_distinguished(self):
        names, _ = names_and_addresses([host("10.0.0.1"), host("10.0.0.2")])

        assert names == ["node-10.0.0.1", "node-10.0.0.2"]

    def test_tasks_on_one_host_use_the_loopback(self):
        hosts = [host("10.0.0.1", identity="1"), host("", identity="1", error="no network")]

        assert names_and_addresses(hosts) == (["node", "node"], ["127.0.0.1", "127.0.0.1"])

    def test_a_host_without_an_address_fails_all_tasks(self):
        with pytest.raises(UnreachableError, match="it has no network"):
            names_and_addresses(
                [host("10.0.0.1"), host("", error="it has no network", identity="2")]
            )


class TestOwnAddress:
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
        monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: found)
        monkeypatch.setattr(addresses, "route_address", {"driver": "10.1.0.5"}.get)

    @pytest.mark.usefixtures("machine")
    @pytest.mark.parametrize(
        ("preferred", "found"),
        [
            ("10.0.0.5", "10.0.0.5"),
            ("fd00::5", "fd00::5"),
            ("fd00:0::5", "fd00::5"),
            ("169.254.3.4", "169.254.3.4"),
            # As on Debian, where a host's name leads to its loopback interface.
            ("127.0.1.1", "10.1.0.5"),
            ("192.0.2.1", "10.1.0.5"),
            ("a-name-that-is.invalid", "10.1.0.5"),
        ],
    )
    def test_sparks_address_is_used_or_the_one_on_the_route_to_the_driver(self, preferred, found):
        assert own_address(preferred, "driver", (), "nics") == found

    @pytest.mark.usefixtures("machine")
    def test_without_either_it_is_an_error(self):
        with pytest.raises(UnreachableError, match=r"eth1 \(10\.1\.0\.5\).*SparkBackend\(nics"):
            own_address("192.0.2.1", "elsewhere", (), "nics")

    @pytest.mark.usefixtures("machine")
    def test_only_the_requested_interfaces_are_used(self):
        assert own_address("10.1.0.5", "driver", ["eth0"], "nics") == "10.0.0.5"
        assert own_address("10.1.0.5", "driver", ["eth0", "eth1", "eth7"], "nics") == "10.1.0.5"
        with pytest.raises(UnreachableError, match=r"IFACE=eth7.*eth1 \(10\.1\.0\.5\)"):
            own_address("", "", ["eth7"], "HOROVOD_GLOO_IFACE")
        with pytest.raises(UnreachableError, match=r"nics=eth7, lo with an address"):
            own_address("127.0.0.1", "", ["eth7", "lo"], "nics")

    @pytest.mark.usefixtures("machine")
    def test_the_environment_of_a_rank_names_its_address_and_interface(self):
        assert listening_environment("10.1.0.5") == {
            "HVD_ESTIMATORS_GLOO_ADDRESS": "10.1.0.5",
            "HOROVOD_GLOO_IFACE": "eth1",
            "GLOO_SOCKET_IFNAME": "eth1",
            "NCCL_SOCKET_IFNAME": "=eth1",
        }


def test_a_host_identity_is_shared_within_a_host_and_differs_between_hosts(monkeypatch):
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
