"""Users' stateful objects are found, saved and restored; undeclared state is reported."""

from __future__ import annotations

import collections
import importlib
import io
import logging
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from backends import InProcessBackend
from parquet_files import write_columns

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.store import LocalStore
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.torch.serialization import load_module, load_state, module_file, save_state
from hvd_estimators.torch.stateful import StatefulObjects

NET = torch.nn.Linear(1, 1)


class Counter:
    """Counter of calls with ``state_dict`` methods, as PyTorch's objects have."""

    def __init__(self, **more: Any) -> None:
        self.more = more
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Holder:
    """Callback that holds other objects and has no state itself."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def step(self) -> None:
        pass

    def __call__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda c: c, "it"),
        (lambda c: [c], "it.Counter[0]"),
        (lambda c: Holder(scheduler=c, number=3), "it.scheduler"),
        (lambda c: Holder(all={"a": c}), "it.all['a']"),
        (lambda c: [Holder(), Holder(mine=[0, c], again=c)], "it.Holder[1].mine[1]"),
    ],
)
def test_state_of_given_objects_and_their_attributes_is_restored(
    make: Callable[[Counter], Any], name: str
) -> None:
    counter = Counter()
    counter.calls = 3
    states = StatefulObjects({"it": make(counter)}, NET).capture()
    assert states == {name: {"calls": 3}}
    file = io.BytesIO()
    save_state(states, file)
    file.seek(0)
    fresh = Counter()
    StatefulObjects({"it": make(fresh)}, NET).restore(load_state(file))
    assert fresh.calls == 3


def test_weights_that_only_a_declared_optimizer_refers_to_are_saved() -> None:
    def made(value: float) -> tuple[torch.Tensor, StatefulObjects]:
        weight = torch.nn.Parameter(torch.full((2,), value))
        optimizer = torch.optim.SGD([weight, *NET.parameters()], lr=0.1)
        return weight, StatefulObjects({"stateful": [optimizer]}, NET)

    trained, held = made(3.0)
    states = held.capture()
    assert list(states) == ["stateful.SGD[0]", "stateful.SGD[0].params"]
    fresh, restored = made(1.0)
    restored.restore(states)
    assert torch.equal(fresh, trained)
    # A module that is saved has the weights already.
    loss = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(loss.parameters())
    held = StatefulObjects({"a": optimizer, "b": loss}, NET)
    assert [name for name, _ in held.items()] == ["a", "b"]


def test_states_belong_to_objects_of_their_class(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Counter):
        pass

    first, second = Counter(), Counter()
    first.calls, second.calls = 1, 2
    states = StatefulObjects({"callbacks": [Other(), first, second]}, NET).capture()
    # The next fit of the run leaves the first callback out.
    fresh = [Counter(), Counter()]
    StatefulObjects({"callbacks": fresh}, NET).restore(states)
    assert [counter.calls for counter in fresh] == [1, 2]
    assert "Other[0]: the run's checkpoint holds its state, and the object does not" in caplog.text


class Attributes(torch.nn.Module):
    """Module with a stateful attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.steps = 0
        self.owner = self.layer
        self.rate = Counter()


class Unloadable(Attributes):
    def get_extra_state(self) -> Any:
        return {"counter": Counter()}


def test_objects_in_attributes_of_all_layers_are_found() -> None:
    net = torch.nn.Sequential(Attributes())
    net.add_module("again", net[0])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net[0].layer.known, net.free = optimizer, torch.optim.SGD(net.parameters(), 0.1)
    found = StatefulObjects({}, net, (optimizer,))
    assert [name for name, _ in found.items()] == ["model.free", "model.0.rate"]
    net[0].rate.calls = 5
    states = found.capture()
    net[0].rate.calls = 0
    found.restore(states)
    assert net[0].rate.calls == 5


def test_globals_of_importable_modules_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        class Counter:
            calls = 0
            def state_dict(self): return {"calls": self.calls}
            def load_state_dict(self, state): self.calls = state["calls"]

        counter = Counter()

        def step():
            return (lambda: counter)()
    """
    (tmp_path / "users_steps.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    steps = importlib.import_module("users_steps")
    given = steps.step, (steps.counter,)
    step, (counter,) = load_module(module_file(given, given[1]))
    assert step() is counter is steps.counter


def test_estimators_reject_state_that_no_checkpoint_holds(tmp_path: Path) -> None:
    net = torch.nn.Sequential(Unloadable())
    estimator = TorchEstimator(
        **{"model": net, "store": LocalStore(str(tmp_path)), "loss": torch.nn.MSELoss()},
        **{"optimizer": torch.optim.SGD(net.parameters(), 0.1)},
        **{"label_cols": ["y"], "feature_cols": ["x"]},
    )
    with pytest.raises(ParamError, match=r"model: '0\._extra_state' .* from get_extra_state\(\)"):
        Fit(estimator).framework.check()
    with pytest.raises(ParamError, match=r"stateful: expected objects with state_dict\(\) and"):
        TorchEstimator(stateful=[Counter(), 3])
    with pytest.raises(ParamError, match="stateful: expected a list"):
        TorchEstimator(stateful=Counter())


def test_unsavable_state_is_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken = Counter()
    broken.state_dict = mock.Mock(side_effect=RuntimeError("not now"))  # type: ignore[method-assign]
    answers_all = mock.MagicMock()
    owners = [Holder(a=Counter(lock=object())), broken, answers_all, Counter, torch.nn.MSELoss()]
    held = StatefulObjects({"callbacks": owners}, NET)
    with caplog.at_level(logging.WARNING):
        assert held.capture() == held.capture() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "callbacks.Holder[0].a: Counter.state_dict() returns more than tensors and plain values. "
        "Checkpoints do not hold its state, and a resumed run starts without it. Return tensors "
        "and plain values from state_dict().",
        "callbacks.Counter[0]: Counter.state_dict() failed (RuntimeError: not now). Checkpoints do "
        "not hold its state, and a resumed run starts without it. Return tensors and plain values "
        "from state_dict().",
    ]
    caplog.clear()
    StatefulObjects({"callbacks": [Holder()]}, NET).restore({"callbacks.Holder[0].late": {}})
    assert "callbacks.Holder[0].late: the run's checkpoint holds its state" in caplog.text


class Queued(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["queue"] = [collections.deque([1])]


def test_an_optimizer_whose_state_fits_no_checkpoint_ends_the_fit_at_the_first(store: Any) -> None:
    numbers = np.arange(8, dtype=np.float32)
    write_columns(store.get_train_data_path(), {"x": numbers[:, None], "y": numbers})
    net = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        **{"backend": InProcessBackend(), "store": store, "model": net, "verbose": 0},
        **{"optimizer": Queued(net.parameters(), lr=0.1), "loss": torch.nn.MSELoss()},
        **{"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8},
    )
    with pytest.raises(ParamError, match=r"state_dict\(\) of Queued holds more than tensors"):
        estimator.fit_on_parquet()


def test_a_disabled_scaler_is_named(caplog: pytest.LogCaptureFixture) -> None:
    TorchEstimator(stateful=[torch.amp.GradScaler("cpu")])
    assert not caplog.records
    TorchEstimator(stateful=[torch.amp.GradScaler("cuda", enabled=False)])
    assert "stateful: the GradScaler is disabled" in caplog.text
