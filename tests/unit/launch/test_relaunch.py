"""Relaunch policy: when to relaunch a job and with how many ranks; no rank runs here."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from hvd_estimators import run_elastic
from hvd_estimators.exceptions import (
    DependencyError,
    JobCancelledError,
    ParamError,
    SlotsError,
    UnreachableError,
    WorkerFailedError,
)
from hvd_estimators.launch import relaunch, spark_backend
from hvd_estimators.launch.service.elastic_state import CommitStore, commit
from hvd_estimators.launch.service.server import DriverService
from hvd_estimators.launch.spark_backend import SparkBackend

pytestmark = pytest.mark.timeout(60)


def killed(rank: int = 1) -> WorkerFailedError:
    return WorkerFailedError("Rank failed", rank=rank, host="far", cause="killed")


def raised(error_type: str = "ValueError") -> WorkerFailedError:
    return WorkerFailedError("Rank failed", rank=0, cause="raised", error_type=error_type)


class FakeCluster:
    """Launches with scripted ends; the last one returns its number of ranks.

    Attributes
    ----------
    ends : list
        Errors, each with the number of commits before it, and other values to return.
    slots : list of int
        Task slots, one for each query; the last value is kept.
    launches : list of int
        The numbers of ranks so far.
    """

    def __init__(self, *ends: Any, slots: tuple[int, ...] = (2,)) -> None:
        self.ends = list(ends)
        self.slots = list(slots)
        self.launches: list[int] = []
        self.relaunches: list[int] = []
        self.options: dict[str, Any] = {}

    def backend(self, num_proc: int | None, **options: Any) -> Any:
        self.options = options
        return FakeBackend(self, num_proc or 2)


class FakeBackend:
    def __init__(self, cluster: FakeCluster, num_proc: int) -> None:
        self.cluster, self.num_proc = cluster, num_proc

    def num_processes(self) -> int:
        return self.num_proc

    def resized(self, num_proc: int) -> FakeBackend:
        return FakeBackend(self.cluster, num_proc)

    def task_slots(self) -> int:
        slots = self.cluster.slots
        return slots.pop(0) if len(slots) > 1 else slots[0]

    def run_with_commits(
        self, fn: Callable[..., Any], args: tuple[Any, ...], commits: CommitStore
    ) -> list[Any]:
        self.cluster.launches.append(self.num_proc)
        self.cluster.relaunches.append(args[-1])
        end = self.cluster.ends.pop(0) if self.cluster.ends else self.num_proc
        if isinstance(end, tuple):
            end, count = end
            with DriverService("127.0.0.1") as service, commits.serve(service):
                for number in range(count):
                    commit(service.address, 0, number)
        if isinstance(end, BaseException):
            raise end
        return [end]


@pytest.fixture
def launch_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCluster], FakeCluster]:
    """Return a function that makes `run_elastic` launch on a cluster without delays."""
    monkeypatch.setattr(relaunch, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(relaunch, "_RETURN_SECONDS", 0.05)

    def use(cluster: FakeCluster) -> FakeCluster:
        monkeypatch.setattr(spark_backend, "SparkBackend", cluster.backend)
        return cluster

    return use


def test_all_ranks_are_relaunched_when_one_is_lost(launch_on: Any) -> None:
    cluster = launch_on(FakeCluster((killed(), 1), (raised(), 1), (killed(), 1)))
    assert run_elastic(print, num_proc=2, reset_limit=3) == [2]
    assert cluster.launches == [2, 2, 2, 2]
    assert cluster.relaunches == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("slots", "bounds", "expected"),
    [
        ((4,), {}, 4),
        ((3,), {"min_num_proc": 2}, 3),
        ((2, 2, 4), {"min_num_proc": 2}, 4),  # new executors arrive soon
        ((6,), {"max_num_proc": 5}, 5),
        ((6,), {"max_num_proc": 8}, 6),
        ((1, 3, 4), {}, 4),
    ],
)
def test_the_number_of_relaunched_ranks_follows_slots_and_bounds(
    launch_on: Any, slots: tuple[int, ...], bounds: dict[str, int], expected: int
) -> None:
    cluster = launch_on(FakeCluster(killed(), slots=slots))
    assert run_elastic(print, num_proc=4, **bounds) == [expected]
    assert cluster.launches == [4, expected]


def test_too_few_slots_for_too_long_are_an_error_that_names_the_lost_rank(launch_on: Any) -> None:
    launch_on(FakeCluster(killed(), slots=(1,)))
    with pytest.raises(
        SlotsError, match=r"Rank 1 on far was killed.*2 task slots.*has 1"
    ) as caught:
        run_elastic(print, num_proc=4, min_num_proc=2, elastic_timeout=0.05)
    assert "(elastic_timeout, HOROVOD_ELASTIC_TIMEOUT)" in str(caught.value)
    assert isinstance(caught.value.__cause__, WorkerFailedError)


def test_the_timeout_may_come_from_the_environment(
    launch_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "0.01")
    launch_on(FakeCluster(killed(), slots=(1,)))
    with pytest.raises(SlotsError, match=r"not free within 0.01 s"):
        run_elastic(print, num_proc=2)
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "soon")
    with pytest.raises(ParamError, match="HOROVOD_ELASTIC_TIMEOUT: expected seconds, 0 or more"):
        run_elastic(print, num_proc=2)


@pytest.mark.parametrize("error", [SlotsError("gone"), UnreachableError("gone")])
def test_slots_lost_during_a_relaunch_are_waited_for(launch_on: Any, error: Any) -> None:
    cluster = launch_on(FakeCluster(killed(), error, error))
    assert run_elastic(print, num_proc=2) == [2]
    assert cluster.relaunches == [0, 1, 1, 1]

    launch_on(FakeCluster(killed(), *[error] * 1000))
    with pytest.raises(SlotsError, match=r"not free within 0.02 s .*: gone"):
        run_elastic(print, num_proc=2, elastic_timeout=0.02)


@pytest.mark.parametrize(
    "error",
    [
        ParamError("no"),
        DependencyError("no"),
        SlotsError("no"),
        UnreachableError("no"),
        JobCancelledError("no"),
        KeyboardInterrupt(),
    ],
)
def test_errors_that_a_relaunch_cannot_fix_are_raised_at_once(launch_on: Any, error: Any) -> None:
    cluster = launch_on(FakeCluster(error))
    with pytest.raises(type(error)):
        run_elastic(print, num_proc=2)
    assert cluster.launches == [2]


@pytest.mark.parametrize("limit", [0, 2])
def test_reset_limit_bounds_relaunches_and_the_error_lists_all_failures(
    launch_on: Any, limit: int
) -> None:
    cluster = launch_on(FakeCluster(*[(killed(rank), 5) for rank in range(9)]))
    with pytest.raises(WorkerFailedError, match=f"reset_limit={limit}") as caught:
        run_elastic(print, num_proc=2, reset_limit=limit)
    assert len(cluster.launches) == limit + 1
    assert caught.value.relaunches == limit
    assert (caught.value.rank, caught.value.cause) == (limit, "killed")
    assert str(caught.value).count("on far was killed") == limit


@pytest.mark.parametrize(
    ("ends", "launches"),
    [
        ([killed()] * 9, 4),
        ([raised()] * 9, 4),
        ([(killed(), 1)] * 9, 10),
        ([(raised(), 1)] * 9, 10),
        ([killed(), killed(), killed(), (killed(), 1)] * 2, 9),
    ],
)
def test_without_a_limit_a_job_is_relaunched_while_it_makes_progress(
    launch_on: Any, ends: list[Any], launches: int
) -> None:
    cluster = launch_on(FakeCluster(*ends))
    if launches > len(ends):
        assert run_elastic(print, num_proc=2) == [2]
    else:
        with pytest.raises(WorkerFailedError, match="launches have made no progress; set reset"):
            run_elastic(print, num_proc=2)
    assert len(cluster.launches) == launches


def test_old_names_of_the_bounds_are_accepted_with_a_warning(launch_on: Any) -> None:
    cluster = launch_on(FakeCluster(killed(), slots=(1,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_elastic(print, num_proc=2, min_np=1, max_np=3) == [1]
    assert cluster.launches == [2, 1]
    assert [(str(w.message), w.category, w.filename) for w in caught] == [
        (f"{name} is deprecated: set {new}.", DeprecationWarning, __file__)
        for name, new in (("min_np", "min_num_proc"), ("max_np", "max_num_proc"))
    ]


def test_launch_options_are_forwarded(launch_on: Any) -> None:
    cluster = launch_on(FakeCluster())
    run_elastic(print, num_proc=2)
    defaults = inspect.signature(SparkBackend).parameters
    changed = {n: v for n, v in cluster.options.items() if v != defaults[n].default}
    assert changed == {}
    options = {
        "env": {"A": "b"},
        "verbose": 2,
        "start_timeout": 5,
        "executable": "python",
        "stdout": "out",
        "stderr": "err",
        "nics": {"eth1"},
        "prefix_output_with_timestamp": True,
        "resource_profile": "profile",
        "gpus_per_task": 1,
        "cpus_per_task": 2,
        "warm_start": False,
    }
    run_elastic(print, num_proc=2, **options)
    assert cluster.options == options
