"""`TorchModel`'s evaluator: sums of partitions combine to the values over all rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torchmetrics import PearsonCorrCoef

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch import TorchModel

ROWS = 23


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.linear(x)
        return {"y": out[:, 0], "scale": out[:, 1]}


def make_columns() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "y": rng.normal(size=ROWS).astype(np.float32),
        "w": rng.uniform(0.5, 2.0, ROWS).astype(np.float32),
    }


def make_model(**params: Any) -> TorchModel:
    return TorchModel(
        **{
            "model": Net(),
            "loss": functional.mse_loss,
            "metrics": [],
            "feature_columns": ["x"],
            "label_columns": ["y"],
            "outputs": ["y"],
            **params,
        }
    )


def evaluate(
    model: TorchModel, columns: dict[str, Any], cuts: Sequence[int] = (0, 4, 4, 15, ROWS)
) -> tuple[int, dict[str, Any]]:
    """Evaluate partitions of the rows, in batches of five, one of them empty."""
    document, load, combine = model._make_evaluator()
    evaluator = load(document)
    states = []
    for start, stop in itertools.pairwise(cuts):
        sums = evaluator.start()
        for first in range(start, stop, 5):
            rows = slice(first, min(first + 5, stop))
            sums.add({name: column[rows] for name, column in columns.items()})
        states.append(sums.state())
    return combine(states)


def alone(columns: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    made = {name: torch.from_numpy(column) for name, column in columns.items()}
    with torch.no_grad():
        return Net()(made["x"]), made


def test_a_mean_over_rows_and_a_metric_that_is_no_sum() -> None:
    columns = make_columns()
    outputs, made = alone(columns)
    rows, values = evaluate(make_model(metrics=[PearsonCorrCoef(), functional.l1_loss]), columns)
    assert rows == ROWS
    expected = {
        "loss": functional.mse_loss(outputs["y"], made["y"]).item(),
        "PearsonCorrCoef": PearsonCorrCoef()(outputs["y"], made["y"]).item(),
        "l1_loss": functional.l1_loss(outputs["y"], made["y"]).item(),
    }
    assert values == pytest.approx(expected, rel=1e-5)
    assert evaluate(make_model(), columns, cuts=(0, 0))[0] == 0


def test_a_joint_loss_with_sample_weights_and_a_stated_denominator() -> None:
    def loss(outputs: Any, labels: Any, sample_weights: Any) -> dict[str, Any]:
        mask = (labels[0] > 0).float()
        distance = (outputs["y"] - labels[0]) ** 2 * mask * sample_weights
        return {"loss": distance.sum() / mask.sum().clamp(min=1), "denominator": mask.sum()}

    columns = make_columns()
    outputs, made = alone(columns)
    model = make_model(loss=loss, loss_form="joint", sample_weight_col="w", outputs=None)
    _, values = evaluate(model, columns)
    expected = loss(outputs, [made["y"]], made["w"])["loss"].item()
    assert values == {"loss": pytest.approx(expected, rel=1e-5)}


def test_a_sum_several_groups_and_names_of_horovod_spark() -> None:
    columns = make_columns()
    outputs, made = alone(columns)
    model = make_model(
        loss=torch.nn.MSELoss(reduction="sum"),
        metrics=[functional.l1_loss, functional.mse_loss],
        _upstream_names=True,
    )
    _, values = evaluate(model, columns)
    distance = outputs["y"] - made["y"]
    expected = {
        "loss": (distance**2).sum().item(),
        "group_0_y": distance.abs().mean().item(),
        "group_1_y": (distance**2).mean().item(),
    }
    assert values == pytest.approx(expected, rel=1e-5)


def test_losses_evaluate_the_module_that_they_refer_to() -> None:
    net = Net()

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return net.linear.weight.norm()

    with torch.no_grad():
        net.linear.weight += 1
    _, values = evaluate(make_model(model=net, loss=loss), make_columns())
    assert values["loss"] == pytest.approx(net.linear.weight.norm().item(), rel=1e-5)


def test_loss_constructors_get_the_device_and_the_model() -> None:
    columns = make_columns()
    outputs, made = alone(columns)

    def make(model: Any, device: torch.device) -> Any:
        assert isinstance(model, Net)
        assert device.type == "cpu"
        return functional.smooth_l1_loss

    _, values = evaluate(make_model(loss=None, loss_constructors=[make]), columns)
    expected = functional.smooth_l1_loss(outputs["y"], made["y"]).item()
    assert values["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("needed", ["optimizer", "spec"])
def test_a_loss_constructor_that_needs_the_training_is_an_error_on_the_driver(needed: str) -> None:
    make = {"optimizer": lambda optimizer: None, "spec": lambda model, *, spec: None}[needed]
    model = make_model(loss=None, loss_constructors=[make])
    with pytest.raises(ParamError, match=f"^loss_constructors: one needs {needed}, .*set loss"):
        model._make_evaluator()
    allowed = [lambda model, optimizer=None, **others: functional.mse_loss]
    evaluate(make_model(loss=None, loss_constructors=allowed), make_columns())


def test_the_precision_of_training_applies() -> None:
    columns = make_columns()
    _, exact = evaluate(make_model(), columns)
    _, values = evaluate(make_model(precision="bf16"), columns)
    made = alone(columns)[1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = functional.mse_loss(Net()(made["x"])["y"], made["y"]).item()
    assert values["loss"] == pytest.approx(expected, rel=1e-5)
    assert values["loss"] != pytest.approx(exact["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "shape", "classes"),
    [
        ("logits", (4,), 4),
        ("probabilities", (1,), 2),
        ("log_probabilities", (), 2),
        ("values", (), None),
        (None, (4,), None),
        ("logits", (None,), None),
    ],
)
def test_the_number_of_classes_is_known_for_scores(
    kind: str | None, shape: Any, classes: int | None
) -> None:
    assert make_model(outputs_are=kind, output_shapes=[shape]).numClasses == classes
    assert make_model(outputs_are=kind).numClasses is None
