"""Keys of predictors cached by an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytorch_lightning
import torch

from hvd_estimators.inference.broadcast import Hashed
from hvd_estimators.inference.worker import cached_predictor, predictor_key
from hvd_estimators.keras import KerasModel
from hvd_estimators.lightning import LightningModel
from hvd_estimators.torch import TorchModel


def predict(model: Any, *arrays: Any) -> Any:
    """Predict like a Python worker, which caches the previous task's predictor."""
    document, load = model._make_predictor()
    return cached_predictor(predictor_key(Hashed.of(document), load), document, load)(list(arrays))[
        0
    ]


class Shape(torch.nn.Module):
    """Module whose output encodes how it is called."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = next(iter(kwargs.values())) if kwargs else args[0]
        code = 100.0 * bool(kwargs) + 10 * x.ndim + x.element_size()
        return torch.full((len(x),), code)


def test_settings_of_torch_models_are_part_of_the_key() -> None:
    def told(cls: Any, **params: Any) -> float:
        given = {"model": Shape(), "feature_columns": ["a"], "label_columns": ["y"], **params}
        return float(predict(cls(**given), np.ones((3, 4), np.float32))[0])

    for cls in (TorchModel, LightningModel):
        assert told(cls) == 24
        assert told(cls, input_shapes=[[2, 2]]) == 34
        assert told(cls, column_dtypes={"a": "float64"}) == 28
        assert told(cls, input_form="keyword") == 124
        assert told(cls) == 24


class Stepping(pytorch_lightning.LightningModule):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return 2 * batch["a"]


class ByRow(LightningModel):
    factor = 1.0

    def get_prediction_fn(self) -> Callable[..., Any]:
        factor = self.factor
        return lambda module, row: torch.tensor([factor * float(row["a"])])


def test_lightning_steps_and_row_functions_are_part_of_the_key() -> None:
    module, ones = Stepping(), np.ones(3, np.float32)
    given = {"model": module, "feature_columns": ["a"], "label_columns": ["y"]}
    by_row = ByRow(**given)

    found = [predict(LightningModel(**given), ones)[0]]
    found.append(predict(LightningModel(**given, use_predict_step=True), ones)[0])
    found.append(predict(by_row, ones)[0])
    by_row.factor = 5.0
    found.append(predict(by_row, ones)[0])

    assert found == [1, 2, 1, 5]


class FloatType(keras.layers.Layer):
    """Layer that returns the size of Keras's current float type, 16 or 32."""

    def call(self, x: Any) -> Any:
        return 0 * x + float(keras.config.floatx().removeprefix("float"))


def test_the_keras_float_type_is_part_of_the_key() -> None:
    model = keras.Sequential([keras.Input((1,)), FloatType()])
    before = keras.config.floatx()

    def told(floatx: str) -> float:
        fitted = KerasModel(model=model, feature_columns=["a"], label_columns=["y"], _floatx=floatx)
        return float(predict(fitted, np.ones((2, 1), np.float32))[0, 0])

    try:
        assert [told(floatx) for floatx in ("float32", "float16", "float32")] == [32, 16, 32]
    finally:
        keras.config.set_floatx(before)
