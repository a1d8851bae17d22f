"""The diagnosis of given facts about a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_estimators.__main__ import main
from hvd_estimators.commands.cluster_doctor import diagnose_cluster
from hvd_estimators.commands.cluster_facts import DRIVER, ClusterFacts, FailedTask, HostFacts
from hvd_estimators.commands.doctor import Facts, Status

VERSIONS = {"hvd_estimators": "0.1.0", "pyarrow": "14.0.2", "torch": "2.13.0", "horovod": "0.28.1"}


def host(name, **changes):
    found = HostFacts(
        name=name,
        python="3.11.7",
        executable="/env/bin/python",
        versions=VERSIONS,
        addresses=[f"10.0.0.{name[-1]}"],
        unreached={},
        store={},
        skew=(-0.1, 0.2),
    )
    return replace(found, **changes)


def cluster(first=None, second=None, **changes):
    """Return facts about two hosts without problems, except for the given changes."""
    hosts = [host("host1", **(first or {})), host("host2", **(second or {}))]
    return ClusterFacts(
        python="3.11.2", versions=VERSIONS, hosts=hosts, store="/mnt/models", **changes
    )


def problems(facts):
    """Return the problems as (name of the host, component, found, remedy)."""
    return [
        (title.partition(" (")[0], row.component, row.found, row.remedy)
        for title, rows in diagnose_cluster(facts).items()
        for row in rows
        if row.status is Status.PROBLEM
    ]


def only_problem(facts):
    (found,) = problems(facts)
    return found


def test_a_healthy_cluster_has_a_table_for_the_driver_and_each_host():
    report = diagnose_cluster(cluster())

    assert list(report) == [
        DRIVER,
        "host1 (10.0.0.1, 1 task slot)",
        "host2 (10.0.0.2, 1 task slot)",
    ]
    assert not problems(cluster())
    assert {row.status for rows in report.values() for row in rows} == {Status.OK}


def test_a_missing_package_is_named_with_its_version_on_the_driver():
    without = {name: version for name, version in VERSIONS.items() if name != "torch"}

    found = only_problem(cluster(second={"versions": without}))

    assert found[:3] == ("host2", "Packages", "torch missing in /env/bin/python")
    assert found[3].startswith('pip install "torch==2.13.0" on this host, or give all hosts the')


def test_an_optional_package_that_no_host_has_is_a_warning_and_a_required_one_a_problem():
    torchless = {name: version for name, version in VERSIONS.items() if name != "torch"}
    facts = cluster({"versions": torchless}, {"versions": torchless})
    assert not problems(facts)
    assert Status.WARNING in {
        row.status for row in diagnose_cluster(facts)["host2 (10.0.0.2, 1 task slot)"]
    }

    arrowless = {name: version for name, version in VERSIONS.items() if name != "pyarrow"}
    facts = cluster({"versions": arrowless}, {"versions": arrowless})
    assert [found[:2] for found in problems(facts)] == [
        ("host1", "Packages"),
        ("host2", "Packages"),
    ]


def test_a_missing_or_broken_hvd_estimators_is_named_and_no_further_probe_is_missed():
    without = {name: version for name, version in VERSIONS.items() if name != "hvd_estimators"}
    error = "ModuleNotFoundError: No module named 'hvd_estimators'"
    lacking = {"versions": without, "error": error, "unreached": None, "store": None}
    found = only_problem(cluster(second=lacking))
    assert found[:2] == ("host2", "Packages")
    assert found[2] == f"hvd_estimators missing in /env/bin/python ({error})"
    assert 'pip install "<clone or wheel of hvd_estimators>" on this host' in found[3]

    broken = {"error": "ImportError: psutil", "unreached": None, "store": None}
    found = only_problem(cluster(second=broken))
    assert found[2] == "hvd_estimators cannot be imported: ImportError: psutil"


def test_another_version_is_named_with_both_versions():
    found = only_problem(cluster(second={"versions": {**VERSIONS, "torch": "2.12.1"}}))

    assert found[2] == "torch 2.12.1 where the driver has 2.13.0"
    assert 'pip install "torch==2.13.0"' in found[3]


@pytest.mark.parametrize(
    "message",
    [
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version (3, 10) than that in "
        "driver 3.11, PySpark cannot run with different minor versions.",
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in "
        "driver: 3.11, PySpark cannot run with different minor versions.",
    ],
    ids=["PySpark 3.5", "PySpark 4"],
)
def test_another_python_is_named_although_no_task_runs_there(message):
    found = only_problem(cluster(failed=[FailedTask("10.0.0.9", message)] * 4))

    assert found[:2] == ("10.0.0.9", "Python")
    assert found[2] == "3.10; the driver has 3.11.2, and Spark rejects the tasks"
    assert "spark.pyspark.python" in found[3]


@pytest.mark.parametrize(
    ("message", "component", "found"),
    [
        ("ModuleNotFoundError: No module named 'pyarrow'", "Packages", "pyarrow missing"),
        ('Cannot run program "/env/bin/python": error=2', "Python", "/env/bin/python does not"),
        ("the task did not end within 240 s", "Spark task", "did not end within 240 s"),
    ],
)
def test_tasks_that_fail_or_hang_name_their_host(message, component, found):
    problem = only_problem(cluster(failed=[FailedTask("10.0.0.9", message)]))

    assert problem[:2] == ("10.0.0.9", component)
    assert found in problem[2]
    assert problem[3]


def test_only_the_host_that_sees_another_store_has_the_problem():
    apart = {"driver": "does not see it", "host1": "does not see it"}
    facts = cluster(
        {"store": {"host2": "does not see it"}},
        {"store": apart},
        driver_store={"host2": "does not see it"},
    )

    found = only_problem(facts)

    assert found[:2] == ("host2", "Store")
    assert "file of the driver: does not see it" in found[2]
    assert "storage that all machines share" in found[3]


def test_a_host_that_cannot_write_to_the_store_is_named_with_the_error():
    denied = "StoreError: /mnt/models: Permission denied"
    facts = cluster({"store": {"host2": "does not see it"}}, {"store": {"host2": denied}})

    assert only_problem(facts)[2] == f"/mnt/models: cannot write: {denied}"


def test_a_store_that_the_driver_cannot_write_to_is_the_drivers_problem():
    text = "StoreError: no such bucket"
    seen = {"driver": "does not see it"}
    facts = cluster({"store": seen}, {"store": seen}, driver_store={"driver": text})

    assert (DRIVER, "Store") in [found[:2] for found in problems(facts)]


def test_a_host_that_cannot_connect_names_the_other_one_and_its_addresses():
    found = only_problem(cluster({"unreached": {"host2": ["10.0.0.2"]}}))

    assert found[:3] == ("host1", "Network", "cannot connect to host2 (10.0.0.2)")
    assert "open all TCP ports" in found[3]
    assert "nics" in found[3]


@pytest.mark.parametrize(
    ("skew", "text"),
    [
        ((3599.0, 3600.5), "at least 3,599 s ahead of the driver's"),
        ((-3601.0, -3599.2), "at least 3,599 s behind the driver's"),
    ],
)
def test_a_clock_counts_as_wrong_only_by_what_is_certain(skew, text):
    found = only_problem(cluster(second={"skew": skew}))

    assert found[:3] == ("host2", "Clock", text)
    assert "timedatectl" in found[3]
    assert not problems(cluster(second={"skew": (-100.0, 100.0)}))


def test_frameworks_of_a_host_are_judged_as_by_the_local_doctor():
    broken = Facts(
        python="3.11.7", versions={"torch": "2.13.0"}, import_errors={"torch": "OSError: libcudart"}
    )

    found = problems(cluster(second={"installation": broken}))

    assert ("host2", "torch", "2.13.0: OSError: libcudart") in [row[:3] for row in found]


def test_a_host_without_gpus_is_a_problem_where_another_one_has_some():
    with_gpu, without = Facts(python="3.11.7", gpus=("H100",)), Facts(python="3.11.7")

    found = problems(cluster({"installation": with_gpu}, {"installation": without}))

    assert ("host2", "GPUs", "none, where host1 has some") in [row[:3] for row in found]
    alike = cluster({"installation": without}, {"installation": without})
    assert "GPUs" not in [row[1] for row in problems(alike)]


def test_options_of_the_cluster_need_the_flag(capsys):
    assert main(["doctor", "--store", "/mnt/models"]) == 1
    assert "--store needs --cluster" in capsys.readouterr().err
