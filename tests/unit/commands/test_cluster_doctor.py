"""The diagnosis of given facts about the hosts of a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_estimators.__main__ import main
from hvd_estimators.commands.cluster_doctor import HostFacts, diagnose_host
from hvd_estimators.commands.doctor import Facts, Row, Status

VERSIONS = {
    **{"Python": "3.11", "hvd_estimators": "0.1.0", "pyarrow": "14.0.2", "torch": "2.13.0"},
    "horovod": "0.28.1",
}
SENT, RECEIVED = 1000.0, 1020.0
FACTS = Facts(python="3.11.7", versions={"torch": "2.13.0"}, torch_backends=("gloo",))


def host(name: str, **changes: object) -> HostFacts:
    healthy = HostFacts(name, 0, 2, "/env/bin/python", VERSIONS, FACTS, "", 1008.0, 1019.0)
    return replace(healthy, **changes)


def rows(first: HostFacts, *others: HostFacts) -> dict[str, Row]:
    found = diagnose_host(first, [first, *others], VERSIONS, (SENT, RECEIVED))
    return {row.component: row for row in found}


def problems(first: HostFacts, *others: HostFacts) -> set[str]:
    found = rows(first, *others).items()
    return {component for component, row in found if row.status is Status.PROBLEM}


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in VERSIONS.items() if name not in names}


def test_a_healthy_host_has_no_problem():
    found = rows(host("host1"), host("host2"))

    assert not problems(host("host1"), host("host2"))
    assert found["Python"].found == "3.11 (/env/bin/python)"
    assert found["Packages"].found == "4 as on the driver"
    assert str(host("host1")) == "host1 (ranks 0 to 1)"
    assert str(host("host1", slots=1, rank=3)) == "host1 (rank 3)"


def test_a_package_that_other_hosts_have_is_missing_with_its_version_on_the_driver():
    lacking = host("host2", versions=without("torch", "horovod"))

    assert problems(lacking, host("host1")) == {"Packages"}
    row = rows(lacking, host("host1"))["Packages"]
    assert row.found == "torch, horovod missing"
    assert row.remedy.startswith(
        'pip install "torch==2.13.0" && hvd-estimators build-horovod on this host, or '
    )


def test_a_package_that_no_host_has_is_a_warning():
    lacking = host("host1", versions=without("horovod"))

    assert not problems(lacking, host("host2", versions=without("horovod")))
    assert rows(lacking)["Packages"].status is Status.WARNING


def test_a_host_that_cannot_write_to_the_store_is_named_with_the_error():
    row = rows(host("host1", store="PermissionError: denied"))["Store"]

    assert row.status is Status.PROBLEM
    assert row.found == "cannot write: PermissionError: denied"
    assert "storage that all machines share" in row.remedy


@pytest.mark.parametrize(
    ("started", "ended", "text"),
    [
        (1008.0, 1019.0, None),
        (SENT - 30, 1019.0, None),
        (1008.0, RECEIVED + 30, None),
        (4610.0, 4620.0, "at least 3,600 s ahead of"),
        (-2600.0, -2590.0, "at least 3,600 s behind"),
    ],
)
def test_a_clock_counts_as_wrong_only_by_what_is_certain(started, ended, text):
    found = rows(host("host1", started=started, ended=ended))

    assert ("Clock" in found) == (text is not None)
    if text:
        assert found["Clock"].found.startswith(text)
        assert found["Clock"].status is Status.PROBLEM


def test_frameworks_of_a_host_are_judged_as_by_the_local_doctor():
    broken = replace(FACTS, import_errors={"torch": "OSError: libtorch.so"})

    assert problems(host("host1", installation=broken)) == {"torch"}


def test_a_host_without_gpus_is_a_problem_where_another_one_has_some():
    cuda = replace(FACTS, gpus=("H100",), torch_cuda="13.0")
    with_gpu = host("host2", installation=cuda)

    assert problems(host("host1"), with_gpu) == {"GPUs"}
    assert rows(host("host1"), with_gpu)["GPUs"].found == "none, where host2 has some"
    assert not problems(with_gpu, host("host1"))


def test_options_of_the_cluster_need_the_flag(capsys):
    assert main(["doctor", "--store", "/mnt/models"]) == 1
    assert "--store needs --cluster" in capsys.readouterr().err
