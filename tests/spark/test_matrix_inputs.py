"""Lists of columns as one input: training, prediction and saving, compared with NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from backends import InProcessBackend
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import SQLTransformer
from pyspark.sql import functions as F

from hvd_estimators import keras as hvd_keras
from hvd_estimators import prepare_data
from hvd_estimators import torch as hvd_torch
from hvd_estimators.exceptions import ColumnError, DataError, ParamError, ShapeError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.loading.readers import DataModule

pytestmark = pytest.mark.spark

ROWS = 24
RATE = 0.01
NUMBERS = ["an int", "a double", "a decimal", "a boolean", "weight"]
FEATURES = [NUMBERS, "image"]
SCHEMA = (
    "`an int` int, `a double` double, `a decimal` decimal(8,3), `a boolean` boolean, weight float, "
    "image array<float>, label double"
)


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rng = np.random.default_rng(3)
    rows = [
        (
            int(rng.integers(-9, 9)),
            float(rng.normal()),
            Decimal(int(rng.integers(-9999, 9999))) / 1000,
            bool(rng.random() < 0.5),
            float(np.float32(rng.random())),
            rng.normal(size=4).astype(np.float32).tolist(),
            float(rng.normal()),
        )
        for _ in range(ROWS)
    ]
    return spark.createDataFrame(rows, SCHEMA).coalesce(1).cache()


@pytest.fixture(scope="module")
def rows(frame: Any) -> pd.DataFrame:
    made: pd.DataFrame = frame.toPandas()
    return made


def inputs_of(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    return rows[NUMBERS].astype(float).to_numpy(), np.array(rows["image"].tolist())


def weights_after_a_step(rows: pd.DataFrame) -> list[np.ndarray]:
    """Return the weights after one step from zero on all rows, for the weighted squared error."""
    labels = (rows["weight"] * rows["label"]).to_numpy()
    return [RATE * 2 * (labels[:, None] * x).mean(axis=0) for x in inputs_of(rows)]


def predicted(rows: pd.DataFrame) -> np.ndarray:
    return sum(x @ w for x, w in zip(inputs_of(rows), weights_after_a_step(rows), strict=True))


class TwoInputs(torch.nn.Module):
    """Sum of two linear layers, one for the matrix of numbers and one for the image."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Linear(5, 1, bias=False)
        self.image = torch.nn.Linear(4, 1, bias=False)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, numbers: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return (self.numbers(numbers) + self.image(image))[:, 0]


class ColumnBatches(DataModule):
    """A user's data module, whose batches have the columns of the files."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.table = pq.read_table(self.train_dir)

    def train_data(self) -> Iterator[Any]:
        assert set(self.schema_fields) == {*NUMBERS, "image", "label"}
        batch = {n: np.array(self.table[n].to_pylist()) for n in self.schema_fields}
        yield from itertools.repeat(batch)

    def val_data(self) -> Iterator[Any]:
        return iter(())


def estimator(store: Any, cls: Any = hvd_torch.TorchEstimator, **params: Any) -> Any:
    cloudpickle.register_pickle_by_value(__import__(__name__))
    given: dict[str, Any] = {
        "backend": InProcessBackend(),
        "store": store,
        "feature_cols": FEATURES,
        "label_cols": ["label"],
        "sample_weight_col": "weight",
        "batch_size": ROWS,
        "verbose": 0,
    }
    if cls is hvd_torch.TorchEstimator:
        given |= {
            "model": TwoInputs(),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=RATE),
            "loss": torch.nn.functional.mse_loss,
        }
    return cls(**{**given, **params})


def assert_trained(weights: list[np.ndarray], rows: pd.DataFrame) -> None:
    for found, expected in zip(weights, weights_after_a_step(rows), strict=True):
        np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-4, atol=1e-7)


def torch_weights(model: Any) -> list[np.ndarray]:
    return [p.detach().numpy() for p in model.getModel().parameters()]


def test_a_pipeline_trains_predicts_and_is_saved(
    frame: Any, rows: pd.DataFrame, store: Any, tmp_path: Path
) -> None:
    renamed = SQLTransformer(statement="select *, label as y from __THIS__")
    pipeline = Pipeline(stages=[renamed, estimator(store, label_cols=["y"])])
    pipeline.save(str(tmp_path / "unfitted"))
    loaded = Pipeline.load(str(tmp_path / "unfitted"))
    assert loaded.getStages()[1].getFeatureCols() == FEATURES
    loaded.getStages()[1].setStore(store).setBackend(InProcessBackend())
    fitted = loaded.fit(frame)
    assert_trained(torch_weights(fitted.stages[1]), rows)
    assert fitted.stages[1].getFeatureColumns() == FEATURES

    fitted.save(str(tmp_path / "pipeline"))
    fitted.stages[1].save(str(tmp_path / "model"))
    model = PipelineModel.load(str(tmp_path / "pipeline"))
    expected = predicted(rows)
    found = model.transform(frame).toPandas()
    np.testing.assert_allclose(found["y__output"], expected, rtol=1e-4)
    missing = F.lit(None).cast("int")
    with_null = frame.union(frame.limit(1).withColumn("an int", missing))
    nulls = model.transform(with_null).toPandas()["y__output"]
    np.testing.assert_allclose(nulls, [*expected, np.nan], rtol=1e-4)
    assert model.stages[1].setHandleInvalid("skip").transform(with_null).count() == ROWS
    udf = model.stages[1].as_udf()
    in_sql = frame.select(udf(*(f"`{name}`" for name in [*NUMBERS, "image"]))).toPandas()
    np.testing.assert_allclose(in_sql.iloc[:, 0], expected, rtol=1e-4)

    predictor = hvd_torch.load_predictor(str(tmp_path / "model"))
    assert predictor.feature_columns == (*NUMBERS, "image")
    records = rows.to_dict("records")
    np.testing.assert_allclose(predictor(rows)["y__output"], expected, rtol=1e-4)
    assert [r["y__output"] for r in predictor(records)] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ColumnError, match="There is no column 'weight'"):
        predictor(rows.drop(columns="weight"))


@pytest.mark.parametrize("reader", [None, "arrow", ColumnBatches])
def test_prepared_data_keeps_single_columns(
    frame: Any, rows: pd.DataFrame, store: Any, reader: Any
) -> None:
    made = estimator(store, data_module=reader)
    with prepare_data(1, store, frame, ["label"], FEATURES) as index:
        model = made.fit_on_parquet(dataset_idx=index)
    assert_trained(torch_weights(model), rows)


def test_a_transformation_takes_the_single_columns(
    frame: Any, rows: pd.DataFrame, store: Any
) -> None:
    def double(columns: Any) -> Any:
        return {**columns, "a double": 2 * columns["a double"]}

    fitted = estimator(store, transformation_batch_fn=double, apply_transformation=True).fit(frame)
    rows = rows.assign(**{"a double": 2 * rows["a double"]})
    assert_trained(torch_weights(fitted), rows)
    found = fitted.transform(frame).toPandas()["label__output"]
    np.testing.assert_allclose(found, predicted(rows), rtol=1e-4)


@pytest.mark.once
def test_keras_pairs_the_matrix_with_an_input(
    frame: Any, rows: pd.DataFrame, store: Any, tmp_path: Path
) -> None:
    # The input of the name "numbers" comes second.
    inputs = [keras.Input((4,), name="image"), keras.Input((5,), name="numbers")]
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in inputs]
    net = keras.Model(inputs, sum(layer(x) for layer, x in zip(layers, inputs, strict=True)))
    model = estimator(
        store,
        hvd_keras.KerasEstimator,
        backend=LocalBackend(1, env={"TF_CPP_MIN_LOG_LEVEL": "3"}),
        model=net,
        optimizer=keras.optimizers.SGD(RATE),
        loss="mse",
        feature_cols=[{"numbers": NUMBERS}, "image"],
    ).fit(frame)
    image, numbers = (w.numpy() for w in model.getModel().weights)
    assert_trained([numbers, image], rows)
    found = model.transform(frame).toPandas()["label__output"]
    np.testing.assert_allclose(found, predicted(rows), rtol=1e-4)
    model.save(str(tmp_path / "model"))
    predictor = hvd_keras.load_predictor(str(tmp_path / "model"))
    np.testing.assert_allclose(predictor(rows)["label__output"], predicted(rows), rtol=1e-4)


def test_errors_name_the_column_and_suggest_a_list(frame: Any, store: Any) -> None:
    one_input = torch.nn.Linear(4, 1)
    flat = ["an int", "a double", "a decimal", "a boolean"]
    suggestion = r'feature_cols=\[\["an int", "a double", "a decimal", "a boolean"\]\] makes one'
    with pytest.raises(ShapeError, match=suggestion):
        estimator(store, model=one_input, feature_cols=flat).fit(frame)
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    keras_params = {"model": net, "optimizer": "sgd", "loss": "mse", "feature_cols": flat}
    with pytest.raises(ShapeError, match=suggestion):
        estimator(store, hvd_keras.KerasEstimator, **keras_params).fit(frame)
    with pytest.raises(ColumnError, match=r"feature_cols: expected one number per row.*'image'"):
        estimator(store, feature_cols=[["an int", "image"], "weight"]).fit(frame)
    with pytest.raises(ColumnError, match="feature_cols: the DataFrame has no column 'x'"):
        estimator(store, feature_cols=[["an int", "x"], "image"]).fit(frame)
    with pytest.raises(ParamError, match="the input 'label', which is also"):
        estimator(store, feature_cols=[{"label": NUMBERS}, "image"]).fit(frame)
    with_null = frame.withColumn("an int", F.lit(None).cast("int"))
    with pytest.raises(DataError, match=r"'an int'.* null"):
        estimator(store).fit(with_null)
