"""Models and estimators that are saved and loaded again, in all environments."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from pyspark.errors import PythonException
from pyspark.ml import PipelineModel
from pyspark.ml.feature import VectorAssembler

from hvd_estimators.exceptions import StoreError
from hvd_estimators.keras import KerasModel
from hvd_estimators.lightning import LightningModel
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.versions]

ROWS = [(n % 5 / 4.0, float(n % 7) / 6.0) for n in range(24)]
COLUMNS: dict[str, Any] = {"label_columns": ["label"], "output_shapes": [[1]]}
BESIDE_SCRIPT = """
import torch
from lightning.pytorch import LightningModule

class Sum(LightningModule):
    def forward(self, x, y):
        return torch.stack([x, y], 1).float().sum(1)
"""


def sum_of_two() -> torch.nn.Module:
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    return net


def torch_model() -> TorchModel:
    return TorchModel(
        model=sum_of_two(), feature_columns=["features"], input_shapes=[[-1, 2]], **COLUMNS
    )


def keras_model() -> KerasModel:
    inputs = [keras.Input((1,), name=name) for name in ("x", "y")]
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    net = keras.Model(inputs, dense(keras.layers.Concatenate()(inputs)))
    return KerasModel(model=net, feature_columns=["a.b", "é"], **COLUMNS)


def check_sums(spark: Any, model: Any, kind: str) -> None:
    df = spark.createDataFrame(ROWS, ["a.b", "é"]).repartition(1)
    if kind in ("torch", "pipeline"):
        # Spark's own transformers do not accept dots in a name.
        df = df.toDF("a", "b")
    if kind == "torch":
        df = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(df)
    found = model.transform(df).collect()
    expected = [row[0] + row[1] for row in found]
    assert len(found) == len(ROWS)
    np.testing.assert_allclose([row["label__output"] for row in found], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["torch", "keras", "pipeline"])
def test_a_saved_model_predicts_the_same(spark: Any, kind: str, tmp_path: Path) -> None:
    model: Any = keras_model() if kind == "keras" else torch_model()
    if kind == "pipeline":
        assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
        model = PipelineModel(stages=[assembler, model])
    model.write().save(f"{tmp_path / 'model'}")
    check_sums(spark, type(model).load(f"{tmp_path / 'model'}"), kind)


def test_a_saved_class_of_a_module_beside_the_script_needs_the_file(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums_beside_script.py").write_text(BESIDE_SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    net = importlib.import_module("sums_beside_script").Sum()
    LightningModel(model=net, feature_columns=["a.b", "é"], **COLUMNS).save(f"{tmp_path / 'model'}")
    # The class is pickled by reference, like a class of any other module.
    with pytest.raises(PythonException, match=r"'sums_beside_script'.*addPyFile\('sums_beside"):
        check_sums(spark, LightningModel.load(f"{tmp_path / 'model'}"), "lightning")
    spark.sparkContext.addPyFile(f"{tmp_path / 'sums_beside_script.py'}")
    check_sums(spark, LightningModel.load(f"{tmp_path / 'model'}"), "lightning")


def test_a_saved_estimator_loads_with_its_params(spark: Any, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["features"],
        batch_size=8,
        epochs=2,
    ).save(f"{tmp_path / 'estimator'}")
    estimator = TorchEstimator.load(f"{tmp_path / 'estimator'}")
    assert (estimator.getBatchSize(), estimator.getEpochs()) == (8, 2)
    assert estimator.getFeatureCols() == ["features"]
    assert not estimator.isSet("store")
    for name, value in net.state_dict().items():
        assert torch.equal(estimator.getModel().state_dict()[name], value)
    assert estimator.getOptimizer().defaults["lr"] == 0.01


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_a_model_of_an_unknown_format_is_rejected(spark: Any, version: Any, tmp_path: Path) -> None:
    torch_model().save(f"{tmp_path / 'model'}")
    (part,) = (tmp_path / "model" / "metadata").glob("part-*")
    document = json.loads(part.read_text())
    assert document["formatVersion"] == 1
    part.write_text(json.dumps({**document, "formatVersion": version}))
    for crc in part.parent.glob(".*.crc"):
        crc.unlink()
    message = r"formatVersion" if version == "1" else rf"format {version}.*reads 1.*Install"
    with pytest.raises(StoreError, match=message) as caught:
        TorchModel.load(f"{tmp_path / 'model'}")
    assert str(tmp_path / "model") in str(caught.value)
