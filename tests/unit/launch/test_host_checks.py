"""Facts that tasks exchange about their machines, and the problems found in them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.exceptions import DependencyError, GpuError
from hvd_estimators.launch.rank.environment import assign_ranks
from hvd_estimators.launch.rank.outcome import RankOutcome, results_in_order
from hvd_estimators.launch.task.host_checks import (
    check_machines,
    differences,
    gpu_variables,
    installed_versions,
    machine_problem,
)
from hvd_estimators.launch.task.settings import TaskSettings

JOB = TaskSettings(
    call=b"",
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


def check(names: str, *problems: list[str] | None) -> None:
    check_machines([SimpleNamespace(name=name) for name in names], problems)  # type: ignore[misc]


def test_equal_packages_pass_and_a_rank_sees_its_gpus() -> None:
    mine = machine_problem(task("4", "7"), JOB)

    assert mine is None
    check("ab", mine, mine)
    slots = assign_ranks(["a", "b"])
    assert gpu_variables(task("4", "7"), JOB, slots[1])["CUDA_VISIBLE_DEVICES"] == "4,7"
    hidden = replace(JOB, env={"CUDA_VISIBLE_DEVICES": ""})
    assert gpu_variables(task("4", "7"), hidden, slots[1]).get("CUDA_VISIBLE_DEVICES") is None


def test_a_version_mismatch_names_the_machine_both_versions_and_a_remedy() -> None:
    here = machine_problem(task(), JOB)
    there = machine_problem(task(), replace(JOB, versions={**JOB.versions, "torch": "1.0"}))

    torch = JOB.versions["torch"]
    found = rf"A task on b has torch {torch} where the driver has 1\.0\. Install .*archives"
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


def test_a_custom_executable_skips_the_version_check() -> None:
    job = replace(JOB, executable="/their/python", versions={"torch": "1.0"})

    assert machine_problem(task(), job) is None


def test_a_gpu_that_is_not_visible_fails_all_tasks() -> None:
    hidden = replace(JOB, driver_env={"CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(GpuError, match="sees 1"):
        check("ab", machine_problem(task("3"), hidden), None)
