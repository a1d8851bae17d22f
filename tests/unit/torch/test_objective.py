"""Training objectives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.torch.loss import Loss
from hvd_estimators.torch.loss_weights import StepWeights
from hvd_estimators.torch.objective import Objective
from hvd_estimators.torch.tensors import TensorSpec

TENSORS = TensorSpec(("x",), ("blue", "amber"), sample_weight_col="w")
COLUMNS = {
    "x": torch.tensor([[1.0], [2.0], [4.0]]),
    "blue": torch.tensor([1.0, 0.0, 2.0]),
    "amber": torch.tensor([0.5, 0.5, 0.5]),
    "w": torch.tensor([1.0, 2.0, 0.5]),
}


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.scale, x + self.scale


def bias(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    assert not torch.is_grad_enabled()
    return (output - label).mean()


def make(**changes: Any) -> Objective:
    given: dict[str, Any] = {
        "tensors": TENSORS,
        "losses": (torch.nn.MSELoss(), torch.nn.L1Loss()),
        "loss_constructors": None,
        "loss_weights": (1.0, 0.25),
        "metrics": ((bias,), (torch.nn.functional.l1_loss, bias)),
        "train_minibatch_fn": None,
    }
    return Objective(**{**given, **changes})


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_weighted_class_losses_take_each_type_of_class_numbers(dtype: str) -> None:
    weight = torch.tensor([0.5, 1.0, 4.0])
    loss = Loss([torch.nn.CrossEntropyLoss(weight)], [1.0])
    label = torch.tensor([2, 0, 2], dtype=getattr(torch, dtype))
    # The weights of the labels' classes.
    assert loss.denominators([label]).tolist() == [8.5]


def test_tensors_and_modules_that_a_loss_is_given_are_on_the_ranks_device() -> None:
    def distilled(teacher: Any, weight: Any, output: Any, label: Any, **_: Any) -> Any:
        raise AssertionError

    teacher, knobs, scale = torch.nn.Linear(2, 1), {"beta": [torch.ones(2)]}, torch.tensor(1.0)
    inner = functools.partial(distilled, teacher, torch.ones(2))
    given = (
        functools.partial(functional.cross_entropy, weight=torch.ones(2)),
        functools.partial(inner, knobs=knobs, scale=scale),
    )
    objective = make(losses=given).on_rank(torch.device("meta"))
    assert objective.loss is not None
    first, second = objective.loss.functions
    assert first.keywords["weight"].is_meta
    assert teacher.weight.is_meta
    assert second.args[1].is_meta
    assert knobs["beta"][0].is_meta
    # A callback that holds them changes what the loss gets.
    assert (first, second) == given
    assert second.keywords == {"knobs": knobs, "scale": scale}
    assert second.keywords["knobs"] is knobs
    assert second.keywords["scale"] is scale


def test_loss_and_metrics_agree_with_manual_code() -> None:
    module = Two()
    x, weights = COLUMNS["x"][:, 0], COLUMNS["w"]
    blue, amber = x * 0.5 - COLUMNS["blue"], x + 0.5 - COLUMNS["amber"]
    loss = (weights * blue**2).sum() / 3 + 0.25 * (weights * amber.abs()).sum() / 3
    expected = {
        "loss": loss,
        "blue_bias": blue.mean(),
        "amber_bias": amber.mean(),
        "blue_l1_loss": blue.abs().mean(),
        "amber_bias_2": amber.mean(),
    }

    objective = make().on_rank(torch.device("cpu"))
    evaluation = objective.evaluate(module, TENSORS.batch(COLUMNS))
    found = {"loss": evaluation.loss, **objective.metrics(evaluation)}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {name: value.item() for name, value in expected.items()}
    )


def test_loss_constructors_get_their_arguments_and_must_allow_weights() -> None:
    seen = {}

    def first(device: Any, rank: int) -> Any:
        seen.update(device=device, rank=rank)
        return torch.nn.MSELoss()

    def second(**everything: Any) -> Any:
        seen.update(names=sorted(everything))
        return torch.nn.L1Loss()

    offered = {"model": None, "optimizer": None, "rank": 3, "size": 4, "spec": None}
    constructed = make(losses=None, loss_constructors=(first, second))
    objective = constructed.on_rank(torch.device("cpu"), **offered)
    batch = TENSORS.batch(COLUMNS)
    given = make().on_rank(torch.device("cpu"))
    assert torch.equal(objective.evaluate(Two(), batch).loss, given.evaluate(Two(), batch).loss)
    assert seen == {
        "device": torch.device("cpu"),
        "rank": 3,
        "names": ["device", "model", "optimizer", "rank", "size", "spec"],
    }

    unweightable = make(losses=None, loss_constructors=(lambda: bias, second))
    with pytest.raises(ParamError, match=r"^loss: .* cannot be weighted"):
        unweightable.on_rank(torch.device("cpu"), **offered).evaluate(Two(), batch)


def test_custom_steps_get_the_weighted_loss_and_the_plain_loss_is_measured() -> None:
    given = {}

    def step(model: Any, optimizer: Any, align: Any, loss_fn: Any, inputs: Any, labels: Any) -> Any:
        outputs = model(*inputs)
        given["loss"] = loss_fn(*align(outputs, labels))
        return outputs, given["loss"]

    objective = make(train_minibatch_fn=step).on_rank(torch.device("cpu"))
    assert objective.has_own_step
    batch = TENSORS.batch(COLUMNS)
    weights = StepWeights()
    weights.start(batch.rows, 2 * batch.rows)
    evaluation = objective.run_minibatch(Two(), None, batch, weights)
    assert given["loss"].item() == pytest.approx(0.5 * evaluation.loss.item())
    assert not evaluation.loss.requires_grad


@pytest.mark.parametrize(
    "outputs", [None, torch.ones(3), torch.distributions.Normal(torch.zeros(3), 1.0), (None, None)]
)
def test_custom_steps_may_return_outputs_that_no_metric_needs(outputs: Any) -> None:
    def run(**changes: Any) -> Any:
        objective = make(train_minibatch_fn=lambda model, *_: (outputs, model.scale * 2), **changes)
        weights = StepWeights()
        weights.start(3, 3)
        return objective.on_rank(torch.device("cpu")).run_minibatch(
            Two(), None, TENSORS.batch(COLUMNS), weights
        )

    found = run(metrics=())
    assert (found.loss.item(), found.outputs) == (1.0, [])
    with pytest.raises(ShapeError, match="label_cols: "):
        run()


def test_a_custom_step_that_returns_a_dict_as_its_loss_is_told_what_to_call() -> None:
    objective = make(train_minibatch_fn=lambda model, *_: (None, {"loss": model.scale}), metrics=())
    with pytest.raises(ParamError, match=r"found a dict as the loss. Call loss_fn.scale"):
        objective.on_rank(torch.device("cpu")).run_minibatch(
            Two(), None, TENSORS.batch(COLUMNS), StepWeights()
        )


class Uncounted(Two):
    """Module with a loss that is not a number, and its prediction."""

    with_prediction = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        predicted = super().forward(x)[0]
        loss = (predicted * 0.0).sum() / torch.tensor(0.0)
        return (loss, predicted) if self.with_prediction else (loss,)


def test_a_batch_without_counted_elements_has_no_gradient_even_if_its_loss_is_nan() -> None:
    def uncounted(outputs: Any, sample_weights: Any) -> Any:
        return {"loss": outputs[0], "denominator": 0}

    def run(with_prediction: bool) -> Any:
        model, weights = Uncounted(), StepWeights()
        model.with_prediction = with_prediction
        weights.start(3, 3)
        objective = make(losses=(uncounted,), joint=True, metrics=()).on_rank(torch.device("cpu"))
        found = objective.evaluate(model, TENSORS.batch(COLUMNS), weights)
        found.step_loss.backward()
        return model.scale.grad

    assert run(with_prediction=True) == 0.0
    with pytest.raises(ParamError, match=r"^loss: it states that no element of a batch counts"):
        run(with_prediction=False)
