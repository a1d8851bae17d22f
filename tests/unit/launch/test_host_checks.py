"""Facts that tasks exchange about their machines, and the problems found in them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.exceptions import DependencyError, GpuError
from hvd_estimators.launch.rank.environment import assign_ranks
from hvd_estimators.launch.rank.outcome import RankOutcome, results_in_order
from hvd_estimators.launch.task import host_checks
from hvd_estimators.launch.task.host_checks import (
    check_machines,
    differences,
    gpu_variables,
    horovod_problem,
    installed_versions,
    machine_facts,
)
from hvd_estimators.launch.task.settings import TaskSettings

JOB = TaskSettings(
    call=b"",
    max_bytes=1,
    secret=b"",
    one_machine=False,
    driver_env={},
    env={},
    service="",
    driver_path=(),
    executable=None,
    verbose=0,
    versions=installed_versions(),
)


@pytest.fixture(autouse=True)
def no_outer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def task(*addresses: str) -> Any:
    resources = {"gpu": SimpleNamespace(addresses=list(addresses))} if addresses else {}
    return SimpleNamespace(resources=lambda: resources)


def offers(*names: str) -> Any:
    return [SimpleNamespace(name=name, identity=f"boot of {name}") for name in names]


def check(names: str, *facts: dict[str, Any]) -> None:
    check_machines(offers(*names), facts)


def test_equal_packages_and_builds_pass_and_gpus_are_reported() -> None:
    mine = machine_facts(task("4", "7"), JOB, "an executor")

    assert mine["gpus"] == ["4", "7"]
    check("ab", mine, mine)
    slots = assign_ranks(["a", "b"])
    assert gpu_variables(task("4", "7"), JOB, slots[1])["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_a_version_mismatch_names_the_machine_both_versions_and_a_remedy() -> None:
    here = machine_facts(task(), JOB, "")
    there = machine_facts(task(), replace(JOB, versions={**JOB.versions, "torch": "1.0"}), "")

    torch = JOB.versions["torch"]
    found = rf"Rank 1 on b has torch {torch} where the driver has 1\.0\. Install .*archives"
    with pytest.raises(DependencyError, match=found) as raised:
        check("ab", here, there)
    # All tasks have the same error, which the driver raises.
    outcomes = [
        RankOutcome(rank, "ab"[rank], None, "DependencyError", str(raised.value))
        for rank in range(2)
    ]
    with pytest.raises(DependencyError, match=found):
        results_in_order(outcomes)


def test_build_tags_and_packages_on_one_side_only_are_ignored() -> None:
    assert "+" not in "".join(installed_versions().values())
    assert differences({"torch": "2", "keras": "3"}, {"torch": "2", "tensorflow": "2"}) == ""


def test_two_builds_of_horovod_are_a_problem_only_for_programs_that_use_it() -> None:
    facts = [{"build": "1a"}, {"build": "2b"}, {"build": "1a"}]

    check("abc", *facts)
    assert "1a on a, c; 2b on b. Install one wheel" in horovod_problem("abc", facts)
    assert horovod_problem("ac", facts[::2]) == ""


def test_a_machine_without_a_usable_horovod_is_named_for_programs_that_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_it = machine_facts(task(), JOB, "")
    with monkeypatch.context() as without:
        without.setattr("hvd_estimators.launch.horovod_build.installed_revision", lambda: 0)
        facts = [with_it, machine_facts(task(), JOB, "")]

    check("ab", *facts)
    problem = horovod_problem("ab", facts)
    assert "hvd-estimators build-horovod" in problem
    assert problem.endswith("Found on b.")


def test_a_custom_executable_skips_the_version_check() -> None:
    job = replace(JOB, executable="/their/python", versions={"torch": "1.0"})

    assert machine_facts(task(), job, "") == {}


def test_a_gpu_assigned_twice_or_not_visible_fails_all_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_checks, "gpu_place", lambda executor: "")
    twice = [machine_facts(task("0"), JOB, executor) for executor in ("1", "1", "2")]
    check("ab", *twice[:2])
    with pytest.raises(GpuError, match="GPU 0 of a to 2 ranks"):
        check("aab", *twice)

    hidden = replace(JOB, driver_env={"CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(GpuError, match="sees 1"):
        check("ab", machine_facts(task("3"), hidden, ""), {})
