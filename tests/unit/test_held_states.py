"""What users' objects hold is found, kept and given back: schedulers, scalers, averages."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from hvd_estimators.torch.checkpoint import load_file, save_file
from hvd_estimators.torch.held_states import HeldStates


class Counter:
    """Counts calls; has state as PyTorch's own objects do."""

    def __init__(self, **more: Any) -> None:
        self.more = more
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Holder:
    """A callback without state of its own."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def step(self) -> None:
        pass

    def __call__(self) -> None:
        pass


in_module = Counter()


def uses_global() -> None:
    in_module.calls += 1


def uses_function() -> None:
    uses_global()


def closure(counter: Counter) -> Callable[[], None]:
    def step() -> None:
        counter.calls += 1

    return step


def partial(function: Any, *_: Any) -> None:
    """Stands for a function that is given what it needs."""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda c: c, "it"),
        (lambda c: Holder(scheduler=c, number=3), "it.scheduler"),
        (lambda c: Holder(all={"a": [0, c]}), "it.all['a'][1]"),
        (lambda c: [Holder(), Holder(mine=c, again=c)], "it[1].mine"),
        (lambda c: Holder(mine=c).step, "it.mine"),
        (closure, "it.counter"),
        (lambda c: functools.partial(partial, 1, scaler=c), "it.keywords['scaler']"),
        (lambda c: functools.partial(closure(c)), "it.func.counter"),
    ],
)
def test_what_is_held_comes_back(make: Callable[[Counter], Any], name: str) -> None:
    counter = Counter()
    counter.calls = 3
    states = HeldStates({"it": make(counter)}).capture()
    assert states == {name: {"calls": 3}}
    file = io.BytesIO()
    save_file(states, file)
    file.seek(0)
    fresh = Counter()
    HeldStates({"it": make(fresh)}).restore(load_file(file))
    assert fresh.calls == 3


@pytest.mark.parametrize("function", [uses_global, uses_function])
def test_global_variables_that_a_function_uses_are_held(function: Any) -> None:
    (state,) = HeldStates({"it": function}).capture().values()
    assert state == {"calls": in_module.calls}


def test_pytorchs_own_objects_come_back(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> tuple[Any, list[Any]]:
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(net)
        held = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=9),
            torch.amp.GradScaler("cpu", init_scale=8.0),
            average,
        ]
        known = (net, *net.modules(), optimizer)
        callback = Holder(module=net, optimizer=optimizer, head=net, held=held)
        return HeldStates({"callbacks": (callback, None)}, known), held

    states, held = make()
    held[0].optimizer.step()
    held[0].step()
    held[1].step()
    held[3].update_parameters(held[3].module)
    captured = states.capture()
    assert list(captured) == [f"callbacks[0].held[{n}]" for n in range(4)]
    assert not caplog.records
    file = io.BytesIO()
    save_file(captured, file)
    file.seek(0)
    again, fresh = make()
    again.restore(load_file(file))
    assert fresh[0].last_epoch == fresh[1].last_epoch == 1
    assert fresh[3].n_averaged == 1
    assert torch.equal(fresh[3].module.weight, held[3].module.weight)


def test_what_cannot_be_kept_is_told_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    broken = Counter()
    broken.state_dict = mock.Mock(side_effect=RuntimeError("not now"))  # type: ignore[method-assign]
    answers_all = mock.MagicMock()
    owners = [Holder(a=Counter(lock=object())), broken, answers_all, Counter, torch.nn.MSELoss()]
    held = HeldStates({"callbacks": owners})
    with caplog.at_level(logging.WARNING):
        assert held.capture() == held.capture() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "callbacks[0].a: Counter.state_dict() returns more than tensors and plain values. It is "
        "not kept: a resumed run begins without it.",
        "callbacks[1]: Counter.state_dict() failed (RuntimeError: not now). It is not kept: a "
        "resumed run begins without it.",
    ]
    caplog.clear()
    HeldStates({"callbacks": [Holder()]}).restore({"callbacks[0].late": {}})
    assert "callbacks[0].late: the run's checkpoint holds its state" in caplog.text
