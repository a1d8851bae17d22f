"""Shapes of a model's outputs from rows of zeros, without reading a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning
import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.frame import known_shapes, rows_of_zeros
from hvd_estimators.lightning import LightningModel
from hvd_estimators.loading.transform import edited_fields


def entry(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


def test_zeros_have_the_shapes_and_types_of_training() -> None:
    metadata = {
        "image": entry("uint8", 4, 3),
        "number": entry("int64"),
        "text": entry("object"),
        "foreign": {"shape": 3},
    }
    edited = edited_fields([("image", "float32", (5,)), ("any", "float32", None)])
    shapes, dtypes = known_shapes(["image", "number", "foreign", "any"], metadata, edited)
    assert shapes == {"image": (5,), "number": ()}
    zeros = rows_of_zeros(["number", "image"], shapes, dtypes)
    assert zeros is not None
    assert [(a.shape, a.dtype.name) for a in zeros.values()] == [
        ((2,), "int64"),
        ((2, 5), "float32"),
    ]
    shapes, dtypes = known_shapes(["image", "text"], metadata)
    assert rows_of_zeros(["image"], shapes, dtypes)["image"].shape == (2, 4, 3)  # type: ignore[index]
    for unknown in ("text", "foreign", "any", "never heard of"):
        assert rows_of_zeros(["image", unknown], shapes, dtypes) is None


class Stepping(pytorch_lightning.LightningModule):
    """Module whose predict_step returns two outputs, unlike forward()."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).sum(1)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1)
        x = batch["x"]
        return x.reshape(len(x), -1, 2), self(x)


@pytest.mark.parametrize(
    "known",
    [
        {"_metadata": {"x": entry("float32", 6)}},
        {"_metadata": {"x": entry("float32", 2, 3)}},
        {"input_shapes": [[-1, 6]], "_metadata": {"x": {"dtype": "float32"}}},
        {
            "transformation_fn": lambda row: row,
            "transformation_edit_fields": [("x", "float64", (6,))],
            "_metadata": {"x": entry("float32", 99)},
        },
        {
            "transformation_batch_fn": lambda columns: {"x": columns["x"][:, :6]},
            "apply_transformation": True,
            "_metadata": {"x": entry("float32", 10)},
        },
    ],
)
def test_shapes_of_a_predict_step_need_no_row(known: dict[str, Any]) -> None:
    given = {"model": Stepping(), "feature_columns": ["x"], "label_columns": ["y", "z"], **known}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    stepping = LightningModel(use_predict_step=True, output_shapes=[[]], **given)
    assert stepping._output_shapes_on(None) == [(3, 2), ()]
    assert torch.equal(torch.get_rng_state(), before)
    assert LightningModel(**{**given, "label_columns": ["y"]})._output_shapes_on(None) == [()]


def test_unknown_shapes_must_be_set() -> None:
    given = {"model": Stepping(), "feature_columns": ["x"], "label_columns": ["y", "z"]}
    odd = {"_metadata": {"x": entry("float32", 5)}, "use_predict_step": True}
    for params in ({}, odd, {"transformation_fn": np.copy, "_metadata": {"x": entry("int8", 6)}}):
        with pytest.raises(ParamError, match="Set output_shapes"):
            LightningModel(**given, **params)._output_shapes_on(None)
    plain = LightningModel(**{**given, "model": torch.nn.Linear(2, 1)}, use_predict_step=True)
    with pytest.raises(ParamError, match="not a LightningModule"):
        plain._make_predictor()
    # Set shapes are used if the shapes are unknown.
    shaped = LightningModel(**given, **odd, output_shapes=[[3, 2], []])
    assert shaped._output_shapes_on(None) == [(3, 2), ()]
