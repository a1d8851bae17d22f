"""Compiled modules and modules with named inputs or outputs."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from objectives import objective_of

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.torch.dry_run import check_fit
from hvd_estimators.torch.serialization import (
    dump_module,
    dump_optimizer,
    load_module,
    load_optimizer,
    plain_module,
)
from hvd_estimators.torch.tensors import TensorSpec, select_outputs

ONE, TWO = torch.zeros(3), torch.ones(3, 2)


@dataclass
class Found:
    price: Any = None
    demand: Any = None
    states: Any = None


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Dataclass that is a dict of its non-None fields, as Hugging Face's."""

    loss: Any = None
    logits: Any = None
    hidden: tuple[Any, ...] = field(default=())

    def __post_init__(self) -> None:
        self.update({"logits": self.logits, "hidden": self.hidden})


Pair = namedtuple("Pair", ["price", "demand"])


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        ({"demand": TWO, "price": ONE}, ["price", "demand"]),
        (OrderedDict(demand=TWO, aux=ONE, price=ONE), ["price", "demand"]),
        (Found(demand=TWO, price=ONE), ["price", "demand"]),
        (Pair(demand=TWO, price=ONE), ["price", "demand"]),
        (Pair(ONE, TWO), ["a", "b"]),
        ((ONE, TWO), ["demand", "price"]),
        ([ONE, TWO], ["demand", "price"]),
        ({"first": ONE, "second": TWO}, []),
    ],
)
def test_named_outputs_are_found_by_name(outputs: Any, labels: list[str]) -> None:
    found = select_outputs(outputs, labels)
    assert len(found) == 2
    assert found[0] is ONE
    assert found[1] is TWO


def test_a_single_label_uses_the_only_output_or_the_logits() -> None:
    assert select_outputs(TWO, ["y"]) == [TWO]
    assert select_outputs({"scores": TWO, "name": "net"}, ["y"])[0] is TWO
    assert select_outputs(Found(demand=TWO), ["y"])[0] is TWO
    assert select_outputs(ModelOutput(logits=TWO, hidden=(ONE,)), ["y"])[0] is TWO


class ByDict(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = self.linear(torch.cat([batch["x"], batch["a"][:, None]], dim=1))
        return {"v": x[:, 0], "y": x[:, :1]}


class ByKeyword(ByDict):
    def forward(self, *, a: torch.Tensor, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward({"a": a, "x": x})


COLUMNS = {
    "x": np.ones((5, 2), np.float32),
    "a": np.ones(5),
    "y": np.ones(5),
    "v": np.ones(5),
    "other": np.ones(5),
}


def spec(form: str, labels: tuple[str, ...] = ("y", "v")) -> TensorSpec:
    return TensorSpec(("x", "a"), labels, input_form=form)


def test_modules_are_called_in_the_configured_input_form() -> None:
    losses = [torch.nn.functional.mse_loss] * 2
    for module, form in ((ByDict(), "dict"), (ByKeyword(), "keyword")):
        assert check_fit(module, objective_of(spec(form), *losses), COLUMNS) == [(1,), ()]
    with pytest.raises(ShapeError, match="input_form='dict' or 'keyword'"):
        check_fit(ByDict(), objective_of(spec("positional"), *losses), COLUMNS)
    with pytest.raises(ShapeError, match=r"the outputs v, y, .* named other\."):
        check_fit(ByDict(), objective_of(spec("dict", ("y", "other")), *losses), COLUMNS)
    with pytest.raises(ParamError, match="input_form: expected one of 'positional', 'keyword'"):
        TorchEstimator(input_form="tuple")


def test_compiled_modules_keep_their_options_and_parameter_names() -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph

    net = torch.nn.Linear(2, 1)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    assert plain_module(compiled) is net
    assert plain_module(net) is net
    loaded = load_module(dump_module(compiled))
    assert type(loaded) is type(compiled)
    assert not calls
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.5)
    bound = load_optimizer(dump_optimizer(optimizer, compiled), loaded)
    assert bound.param_groups[0]["params"][0] is plain_module(loaded).weight
    x = torch.ones(3, 2)
    torch.testing.assert_close(loaded(x), net(x))
    # The driver's dry run does not compile: compiling takes longer than a few rows.
    spec = TensorSpec(("x",), ("y",))
    assert check_fit(compiled, objective_of(spec), COLUMNS) == [(1,)]
    assert not calls


def test_compiled_modules_that_cannot_be_sent_are_rejected() -> None:
    import pytorch_lightning  # noqa: F401 (it changes torch.compile)

    lock = threading.Lock()

    def backend(graph: Any, inputs: Any) -> Any:
        with lock:
            return graph

    net = torch.nn.Linear(2, 1)
    assert type(load_module(dump_module(torch.compile(net, backend="eager")))) is not type(net)
    estimator = TorchEstimator(
        model=torch.compile(net, backend=backend),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
    )
    with pytest.raises(ParamError, match=r"^model: it is sent .* cannot pickle '_thread.lock'"):
        Fit(estimator).framework.check()
