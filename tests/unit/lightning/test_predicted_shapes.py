"""Shapes of a LightningModel's outputs from rows of zeros, without reading a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning
import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning import LightningModel


def entry(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


class Stepping(pytorch_lightning.LightningModule):
    """Module whose predict_step returns two outputs, unlike forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x.flatten(1).sum(1)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1)
        x = batch["x"]
        return x.reshape(len(x), -1, 2), self(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "known",
    [
        {"_metadata": {"x": entry("float32", 6)}},
        {"_metadata": {"x": entry("float32", 2, 3)}},
        {"input_shapes": [[-1, 6]], "_metadata": {"x": {"dtype": "float32"}}},
        {"input_shapes": [[-1, 6]], "transformation_fn": np.copy},
    ],
)
def test_shapes_of_a_predict_step_need_no_row(known: dict[str, Any], device: str) -> None:
    module = Stepping().to(device)
    given = {"model": module, "feature_columns": ["x"], "label_columns": ["y", "z"], **known}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    stepping = LightningModel(use_predict_step=True, output_shapes=[[]], **given)
    assert stepping._output_shapes() == [(3, 2), ()]
    assert torch.equal(torch.get_rng_state(), before)
    assert LightningModel(**{**given, "label_columns": ["y"]})._output_shapes() == [()]


def test_unknown_shapes_must_be_set() -> None:
    given = {"model": Stepping(), "feature_columns": ["x"], "label_columns": ["y", "z"]}
    odd = {"_metadata": {"x": entry("float32", 5)}, "use_predict_step": True}
    for params in ({}, odd, {"transformation_fn": np.copy, "_metadata": {"x": entry("int8", 6)}}):
        with pytest.raises(ParamError, match="Set output_shapes"):
            LightningModel(**given, **params)._output_shapes()
    plain = LightningModel(**{**given, "model": torch.nn.Linear(2, 1)}, use_predict_step=True)
    with pytest.raises(ParamError, match="not a LightningModule"):
        plain._make_predictor()
    # Set shapes are used if the module cannot be tried.
    shaped = LightningModel(**given, **odd, output_shapes=[[3, 2], []])
    assert shaped._output_shapes() == [(3, 2), ()]
