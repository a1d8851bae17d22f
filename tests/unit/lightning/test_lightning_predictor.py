"""LightningModule predictions in a worker: by forward, by predict_step and by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import pytorch_lightning
import torch

from hvd_estimators.exceptions import PredictionError
from hvd_estimators.lightning import LightningModel

ROWS = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


@dataclasses.dataclass
class Answer:
    z: torch.Tensor
    y: torch.Tensor


class Module(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return Answer(x[:, 0], self.net(x))

    def predict_step(self, batch: Any) -> Any:
        return {"y": 2 * self.net(batch["x"]), "z": batch["x"][:, 0]}


class ByRow(LightningModel):
    def get_prediction_fn(self) -> Any:
        return lambda module, row: module.net(torch.as_tensor(row["x"]))


def predict(cls: type[LightningModel], *rows: Any, **params: Any) -> Any:
    given = {"model": Module(), "feature_columns": ["x"], "label_columns": ["y", "z"], **params}
    document, load = cls(**given)._make_predictor()
    return load(document)(list(rows))


def linear() -> Any:
    with torch.no_grad():
        return Module().net(torch.from_numpy(ROWS)).numpy()


def test_named_outputs_follow_the_labels() -> None:
    y, z = predict(LightningModel, ROWS)
    np.testing.assert_array_equal(y, linear())
    np.testing.assert_array_equal(z, ROWS[:, 0])
    y, z = predict(LightningModel, ROWS, use_predict_step=True)
    np.testing.assert_array_equal(y, 2 * linear())
    np.testing.assert_array_equal(z, ROWS[:, 0])


@pytest.mark.parametrize(
    ("cls", "by_step"), [(LightningModel, False), (LightningModel, True), (ByRow, False)]
)
@pytest.mark.parametrize(("precision", "digits"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_half_precision_agrees_with_float32_within_rounding(
    cls: type[LightningModel], by_step: bool, precision: str, digits: float
) -> None:
    given = {"use_predict_step": by_step, "label_columns": ["y"]}
    exact = predict(cls, ROWS, **given)[0]
    found = predict(cls, ROWS, **given, inference_precision=precision)[0]
    error = np.abs(found - exact).max() / (2 if by_step else 1)
    assert digits / 64 < error < 8 * digits


def test_errors_in_a_module_describe_the_inputs() -> None:
    with pytest.raises(PredictionError, match=r"called with x \(64, 5\) float32\. It raised"):
        predict(LightningModel, ROWS[:, :5])
    with pytest.raises(PredictionError, match=r"called with x \(64, 5\) float32\. It raised"):
        predict(LightningModel, ROWS[:, :5], use_predict_step=True)
    with pytest.raises(PredictionError, match=r"called with one row, x \(5,\) float32\. It raised"):
        predict(ByRow, ROWS[:, :5], label_columns=["y"])
