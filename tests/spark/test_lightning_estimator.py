"""LightningEstimator on Spark: fits, predictions, saving, and packages built on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import InProcessBackend
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.param import Param, Params
from pyspark.sql import functions as F
from pytorch_lightning import LightningModule

from hvd_estimators.lightning import LightningEstimator, LightningModel, TorchEstimator, TorchModel

pytestmark = pytest.mark.spark


class Line(LightningModule):
    """Predict y from a vector column."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        return self.linear(v)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self(batch["v"]), batch["y"].float()[:, None])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(batch["v"])
        self.log("val_loss", torch.nn.functional.mse_loss(output, batch["y"].float()[:, None]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def make_frame(spark: Any, rows: int = 120) -> Any:
    """Return rows of y = 2 a - 3 b + 1, with a column of rows to validate on."""
    frame = spark.range(rows).select(
        (F.rand(1) * 2 - 1).alias("a"), (F.rand(2) * 2 - 1).alias("b"), "id"
    )
    return frame.withColumns(
        {"y": 2 * F.col("a") - 3 * F.col("b") + 1, "held_out": F.col("id") % 5 == 0}
    )


def make_estimator(store: Any, **params: Any) -> LightningEstimator:
    return LightningEstimator(
        **{
            "backend": InProcessBackend(),
            "store": store,
            "model": Line(),
            "feature_cols": ["v"],
            "label_cols": ["y"],
            "batch_size": 16,
            "epochs": 2,
            "random_seed": 1,
            "verbose": 0,
            "data_module": "arrow",
            **params,
        }
    )


def with_vector(frame: Any) -> Any:
    return VectorAssembler(inputCols=["a", "b"], outputCol="v").transform(frame)


def test_a_pipeline_fits_predicts_saves_and_loads(
    spark: Any, store: Any, tmp_path: Path, capfd: Any
) -> None:
    frame = make_frame(spark)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="v")
    estimator = make_estimator(
        store,
        backend=None,
        num_proc=2,
        validation="held_out",
        epochs=25,
        verbose=1,
        run_id="line",
        column_dtypes={"y": torch.float32},
    )
    fitted = Pipeline(stages=[assembler, estimator]).fit(frame)
    fitted.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    predicted = loaded.transform(frame)
    assert dict(predicted.dtypes)["y__output"] == "double"
    rows = predicted.select("a", "b", "y", "y__output").collect()
    module = fitted.stages[1].getModel()
    with torch.no_grad():
        expected = module(torch.tensor([[row["a"], row["b"]] for row in rows]))
    found = [row["y__output"] for row in rows]
    np.testing.assert_allclose(found, expected.reshape(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, [row["y"] for row in rows], atol=0.5)

    history = loaded.stages[1].getHistory()
    assert [record["epoch"] for record in history] == list(range(25))
    assert history[-1]["validation"]["val_loss"] < history[0]["validation"]["val_loss"]
    assert history[-1]["train"]["train_loss"] == pytest.approx(history[-1]["train"]["loss"])
    assert "Epoch 25/25" in capfd.readouterr().err
    logs = Path(store.get_logs_path("line"))
    # Only one rank writes logs.
    assert len(list(logs.glob("events.out.tfevents.*"))) == 1
    assert Path(store.get_checkpoints("line")[-1]).name == "checkpoint-000025.ckpt"


class Classifier(TorchEstimator):
    """Estimator like those of packages on ``horovod.spark.lightning``: `Param`, ``_kwargs``."""

    width = Param(Params._dummy(), "width", "inputs of the model")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(width=2, feature_cols=["v"], label_cols=["y"])
        self._kwargs = kwargs
        self._set(**self._kwargs)
        self._set(model=Line())

    def _get_or_create_backend(self) -> Any:
        return InProcessBackend()

    def get_model_class(self) -> type[TorchModel]:
        return ClassifierModel

    def _create_model(self, run_results: Any, run_id: str, metadata: Any) -> Any:
        assert len(run_results) == 1
        assert list(metadata) == ["v", "y"]
        assert metadata["v"]["max_size"] == 2
        model = super()._create_model(run_results, run_id, metadata)
        assert model.getRunId() == run_id
        return model

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any
    ) -> dict[str, Any]:
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "feature_columns": self.getFeatureCols(),
            "input_shapes": self.getInputShapes(),
            "label_columns": self.getLabelCols(),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
            "width": self.getOrDefault(self.width),
        }


class ClassifierModel(TorchModel):
    """Predict row by row, and add a column."""

    width = Param(Params._dummy(), "width", "inputs of the model")

    def get_prediction_fn(self) -> Any:
        def predict(module: torch.nn.Module, row: Any) -> torch.Tensor:
            with torch.no_grad():
                return module(torch.tensor([row["v"]])) * 2

        return predict

    def _transform(self, dataset: Any) -> Any:
        return super()._transform(dataset).withColumn("doubled", F.lit(True))


@pytest.mark.once
def test_subclasses_like_other_packages_predict_row_by_row(spark: Any, store: Any) -> None:
    frame = with_vector(make_frame(spark, 40))
    model = Classifier(store=store, epochs=1, verbose=0, random_seed=0, batch_size=8).fit(frame)
    assert type(model) is ClassifierModel
    assert model.getOrDefault("width") == 2
    predicted = model.setLabelColoumns(["z"]).transform(frame)
    rows = predicted.select("v", "z__output", "doubled").collect()
    with torch.no_grad():
        expected = model.getModel()(torch.tensor(np.array([r["v"] for r in rows])).float()) * 2
    np.testing.assert_allclose([r["z__output"] for r in rows], expected.reshape(-1), rtol=1e-5)
    assert all(row["doubled"] for row in rows)


def test_integers_stay_integers_and_floats_get_the_parameters_type(spark: Any) -> None:
    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding.from_pretrained(torch.arange(8.0).reshape(4, 2))

        def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.table(index).sum(dim=1) * x

    frame = spark.createDataFrame([(1, 2.0), (3, 0.5)], ["index", "x"])
    given = {"feature_columns": ["index", "x"], "outputCols": ["o"], "output_shapes": [[]]}
    model = LightningModel(model=Lookup(), **given)
    assert [row["o"] for row in model.transform(frame).select("o").collect()] == [10.0, 6.5]
