"""Elastic states in a rank, with Horovod's own classes in one process without a job."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from horovod.common import elastic

from hvd_estimators.launch.rank.worker import call_without_notifications
from hvd_estimators.launch.service import elastic_state
from hvd_estimators.launch.service.elastic_state import CommitStore, run_in_rank
from hvd_estimators.launch.service.server import SERVICE_VARIABLE, DriverService

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _own_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore Horovod's notification manager after the test."""
    monkeypatch.setattr(elastic, "notification_manager", elastic.notification_manager)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that calls another one as a rank of a job's next launch."""
    launches = 0
    store = CommitStore()

    def call(fn: Callable[..., Any], *args: Any, rank: int = 0, again: bool = False) -> Any:
        nonlocal launches
        launches += not again
        service = DriverService("127.0.0.1")
        with service, store.serve(service), monkeypatch.context() as patch:
            patch.setenv(SERVICE_VARIABLE, service.address)
            patch.setenv("HOROVOD_RANK", str(rank))
            return run_in_rank(fn, args, {}, launches - 1)

    return call


def object_state(**values: Any) -> Any:
    return elastic.ObjectState(lambda value: value, lambda: 0, **values)


def reset() -> None:
    raise AssertionError("a rank does not begin anew in the same process")


def program(fail_at: int | None, resets: list[int]) -> tuple[int, int]:
    """Count to five, and commit each number."""

    def train(state: Any) -> tuple[int, int]:
        state.rendezvous += 1
        while state.batch < 5:
            if state.batch == fail_at:
                state.batch = 77
                raise ValueError("on purpose")
            state.batch += 1
            state.commit()
        return state.batch, state.rendezvous

    state = object_state(batch=0, rendezvous=0)
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    return elastic.run_fn(train, reset)(state)


def test_a_rank_resumes_from_the_last_commit_and_runs_its_reset_callbacks(launch: Any) -> None:
    resets: list[int] = []
    for fail_at in (0, 3, 3, 4):
        with pytest.raises(ValueError, match="on purpose"):
            launch(program, fail_at, resets)
    # A launch that ends before a commit does not count.
    assert launch(program, None, resets) == (5, 3)
    # Before the second launch there was no commit, and the third launch made none.
    assert resets == [0, 3, 3, 4]


def test_only_rank_0_commits_and_all_ranks_restore_its_state(launch: Any) -> None:
    assert launch(program, None, [], rank=1) == (5, 1)
    assert launch(program, None, [], rank=0) == (5, 1)
    resets: list[int] = []
    assert launch(program, None, resets, rank=1) == (5, 2)
    assert resets == [5]


def test_a_state_can_be_restored_explicitly(launch: Any) -> None:
    def restores() -> int:
        state = object_state(batch=1)

        def train(state: Any) -> int:
            state.commit()
            state.batch = 5
            state.restore()
            return int(state.batch)

        return int(elastic.run_fn(train, reset)(state))

    assert launch(restores) == 1


def test_several_states_are_distinguished_and_each_is_restored_once(launch: Any) -> None:
    def two_phases(fail: bool) -> tuple[int, int]:
        first, second = object_state(batch=0), object_state(batch=100)

        def train(state: Any, steps: int) -> None:
            state.batch += steps
            state.commit()

        step = elastic.run_fn(train, reset)
        step(first, 1)
        step(second, 10)
        step(first, 1)
        if fail:
            raise ValueError("on purpose")
        return first.batch, second.batch

    with pytest.raises(ValueError, match="on purpose"):
        launch(two_phases, True)
    assert launch(two_phases, False) == (4, 120)


def test_states_work_without_relaunches_and_without_notifications(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`run` accepts elastic programs, too. Horovod's manager would ask the rendezvous."""
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    assert call_without_notifications(program, (None, []), {}) == (5, 1)


class State:
    """State that a weak reference can refer to, unlike bytes."""


def test_the_driver_keeps_only_the_last_commit_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[str, Any] = {}
    service: Any = mock.Mock(add_handler=handlers.__setitem__)
    store, references = CommitStore(), []

    def receive(channel: Any) -> State:
        state = State()
        references.append(weakref.ref(state))
        return state

    monkeypatch.setattr(elastic_state, "_receive", receive)
    with store.serve(service):
        for number in (0, 1, 0, 0):
            handlers["commit"](mock.Mock(), {"state": number}, b"")
            gc.collect()
        assert store.count == 4
        assert [reference() is not None for reference in references] == [False, True, False, True]
