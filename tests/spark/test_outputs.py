"""Selected outputs and models without labels, in transform and after saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from variants import others_in_soak

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.keras import KerasModel
from hvd_estimators.keras import load_predictor as load_keras
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.lightning import LightningModel
from hvd_estimators.lightning import load_predictor as load_lightning
from hvd_estimators.torch import TorchEstimator, TorchModel, load_predictor

pytestmark = [pytest.mark.spark, pytest.mark.once]

X = np.arange(12, dtype=np.float32).reshape(4, 3)


class Several(torch.nn.Module):
    """Return a vector and a number per row, and a number for the batch."""

    def __init__(self, as_dict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.as_dict = torch.nn.Linear(3, 2), as_dict

    def forward(self, x: torch.Tensor) -> Any:
        output = self.linear(x)
        if self.as_dict:
            return {"mean": output, "total": output.sum(1), "penalty": output.sum()}
        return output, output.sum(1), output.sum()


def several_in_keras() -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((3,))
    output = keras.layers.Dense(2, name="mean")(x)
    total = keras.layers.Lambda(keras.ops.sum, arguments={"axis": 1}, name="total")(output)
    return keras.Model(x, [output, total])


@pytest.mark.parametrize("framework", others_in_soak("torch", "lightning", "keras"))
def test_selected_outputs_are_columns(spark: Any, tmp_path: Path, framework: str) -> None:
    df = spark.createDataFrame([(row.tolist(),) for row in X], ["x"])
    if framework == "keras":
        module: Any = several_in_keras()
        kind, load = KerasModel, load_keras
        mean, total = (np.asarray(output) for output in module(X))
        names: list[Any] = ["total", "mean"]
    else:
        module = Several(as_dict=framework == "lightning").eval()
        kind, load = {
            "torch": (TorchModel, load_predictor),
            "lightning": (LightningModel, load_lightning),
        }[framework]
        raw = module(torch.from_numpy(X))
        values = list(raw.values()) if isinstance(raw, dict) else raw
        mean, total = values[0].detach().numpy(), values[1].detach().numpy()
        names = ["total", "mean"] if framework == "lightning" else [1, 0]
    shapes = {} if framework == "keras" else {"input_shapes": [[-1, 3]]}
    model = kind(model=module, feature_columns=["x"], label_columns=[], outputs=names, **shapes)
    columns = [f"{n}__output" if isinstance(n, str) else f"output_{n}" for n in names]
    assert model.getOutputCols() == columns

    def check(found: Any) -> None:
        np.testing.assert_allclose(np.ravel(found[columns[0]]), np.ravel(total), rtol=1e-5)
        np.testing.assert_allclose(np.stack(list(found[columns[1]])), mean, rtol=1e-5)

    rows = model.transform(df).collect()
    check({name: [np.asarray(row[name]) for row in rows] for name in columns})
    model.save(str(tmp_path / "model"))
    check(load(str(tmp_path / "model")).predict({"x": X}))
    again = kind.load(str(tmp_path / "model"))
    assert again.getOutputs() == names
    again.setOutputs(names[1])
    (single,) = again.getOutputCols()
    assert single == ("output" if framework == "torch" else "mean__output")
    predicted = again.transform(df).select(single).toPandas()[single]
    np.testing.assert_allclose(np.stack([v.toArray() for v in predicted]), mean, rtol=1e-5)
    again.setOutputCols(["prediction"])
    again.set(again.outputs_are, "values")
    again._setDefault(predictionCol="prediction")
    (row,) = again.transform(df.limit(1)).collect()
    assert len(row["prediction"]) == len(mean[0])
    again.setOutputs(7)
    with pytest.raises((ParamError, ShapeError), match="outputs: found"):
        again.transform(df)


def test_a_fit_without_labels_writes_only_features(spark: Any, tmp_path: Path) -> None:
    df = spark.createDataFrame([(row.tolist(), 1.0) for row in X], ["x", "other"])
    net = torch.nn.Linear(3, 3)
    model = TorchEstimator(
        backend=LocalBackend(1),
        store=Store.create(str(tmp_path)),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        loss=lambda outputs, inputs: torch.nn.functional.mse_loss(outputs, inputs[0]),
        loss_form="joint",
        feature_cols=["x"],
        label_cols=[],
        verbose=0,
    ).fit(df)
    found = model.transform(df).toPandas()["output"]
    expected = net(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(np.stack([v.toArray() for v in found]), expected, rtol=1e-5)
