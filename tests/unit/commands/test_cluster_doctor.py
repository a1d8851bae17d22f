"""The diagnosis of given facts about the hosts of a cluster."""

from __future__ import annotations

from hvd_estimators.__main__ import main
from hvd_estimators.commands.cluster_doctor import HostFacts, packages_of
from hvd_estimators.commands.doctor import Row, Status

VERSIONS = {
    **{"Python": "3.11", "hvd_estimators": "0.1.0", "pyarrow": "14.0.2", "torch": "2.13.0"},
    "horovod": "0.28.1",
}


def host(*missing: str) -> HostFacts:
    versions = {name: version for name, version in VERSIONS.items() if name not in missing}
    return HostFacts("host1 (rank 0)", versions, [])


def row(first: HostFacts, *others: HostFacts) -> Row:
    return packages_of(first, [first, *others], VERSIONS)


def test_a_host_with_the_packages_of_the_driver_has_no_problem():
    assert row(host(), host("torch")) == Row("Packages", "4 as on the driver")


def test_a_package_that_other_hosts_have_is_missing_with_its_version_on_the_driver():
    found = row(host("torch", "horovod"), host())

    assert found.status is Status.PROBLEM
    assert found.found == "torch, horovod missing"
    assert found.remedy.startswith(
        'pip install "torch==2.13.0" && hvd-estimators build-horovod on this host, or '
    )


def test_a_package_that_no_host_has_is_a_warning():
    assert row(host("horovod"), host("horovod")).status is Status.WARNING


def test_options_of_the_cluster_need_the_flag(capsys):
    assert main(["doctor", "--store", "/mnt/models"]) == 1
    assert "--store needs --cluster" in capsys.readouterr().err
