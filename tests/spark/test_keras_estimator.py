"""KerasEstimator on Spark: fits, predictions and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from estimators import plane_rows
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from variants import others_in_soak

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import BestModelCheckpoint, KerasEstimator, KerasModel

pytestmark = pytest.mark.spark


def linear_net() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


class Derived(KerasEstimator):
    """An estimator with the overrides and signatures of packages on ``horovod.spark.keras``."""

    def _create_model(self, run_results: Any, run_id: str, metadata: Any) -> Any:
        assert len(run_results) == self.getNumProc()
        model = super()._create_model(run_results, run_id, metadata)
        assert model.getRunId() == run_id
        return model

    def _get_model_kwargs(
        self, model: Any, history: Any, run_id: str, metadata: Any, floatx: str
    ) -> dict[str, Any]:
        return {
            "history": history,
            "model": model,
            "feature_columns": self.getFeatureCols(),
            "label_columns": self.getLabelCols(),
            "custom_objects": self.getCustomObjects(),
            "run_id": run_id,
            "_metadata": metadata,
            "_floatx": floatx,
        }


def make_estimator(store: Any, cls: Any = KerasEstimator, **params: Any) -> KerasEstimator:
    estimator: KerasEstimator = cls(
        **{
            "num_proc": 2,
            "store": store,
            "model": linear_net(),
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "mse",
            "feature_cols": ["features"],
            "label_cols": ["y"],
            "batch_size": 16,
            "random_seed": 1,
            "verbose": 0,
            "backend_env": {"TF_CPP_MIN_LOG_LEVEL": "3"},
            **params,
        }
    )
    return estimator


def test_a_pipeline_fits_predicts_saves_and_loads(spark: Any, store: Any, tmp_path: Path) -> None:
    frame = plane_rows(spark)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    estimator = make_estimator(
        store,
        epochs=30,
        validation="held_out",
        metrics=[keras.metrics.MeanAbsoluteError(name="off_by")],
        checkpoint_callback=BestModelCheckpoint(),
        callbacks=[keras.callbacks.EarlyStopping(patience=20)],
    )
    pipeline = Pipeline(stages=[assembler, estimator])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    fitted = Pipeline.load(str(tmp_path / "pipeline")).fit(frame)

    model = fitted.stages[-1]
    assert isinstance(model, KerasModel)
    # The label is linear in the features, so the fit converges to its coefficients.
    np.testing.assert_allclose(model.getModel().weights[0].numpy()[:, 0], [2, -3], atol=0.05)
    history = model.getHistory()
    assert set(history) == {"loss", "off_by", "val_loss", "val_off_by"}
    assert len(history["loss"]) == 30
    assert history["val_loss"][-1] < 1e-3 < history["val_loss"][0]
    measured = model.history_frame().pivot(index="epoch", columns=["stage", "name"], values="value")
    assert measured["validation", "off_by"].tolist() == history["val_off_by"]

    predicted = fitted.transform(frame)
    assert dict(predicted.dtypes)["y__output"] == "double"
    rows = predicted.select("a", "b", "y__output").collect()
    inputs = np.array([[row["a"], row["b"]] for row in rows])
    np.testing.assert_allclose(
        [row["y__output"] for row in rows],
        model.getModel().predict(inputs, verbose=0)[:, 0],
        rtol=1e-5,
        atol=1e-6,
    )

    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    assert again.transform(frame).select("a", "b", "y__output").collect() == rows
    assert float(again.stages[-1].getModel().optimizer.learning_rate) == pytest.approx(0.1)
    # The model is a plain Keras file, usable without this package.
    (saved,) = (tmp_path / "fitted").glob("stages/1_*/model.keras")
    plain = keras.saving.load_model(saved)
    assert type(plain.optimizer) is keras.optimizers.SGD
    np.testing.assert_array_equal(plain.weights[0].numpy(), model.getModel().weights[0].numpy())
    run = Path(store.get_run_path(model.getRunId()))
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert "kept.keras" in kept
    assert {name.partition("-")[0] for name in kept} == {"checkpoint", "kept.keras"}
    assert list((run / "logs").glob("events.out.tfevents.*"))


class Multiplied(keras.Model):
    """A model that a copy without its factor does not equal."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense, self.factor = keras.layers.Dense(1), 1.0

    def call(self, x: Any) -> Any:
        return self.factor * self.dense(x)


class Precise(keras.metrics.Metric):
    """F1 as users write it: a value that is set, not added to."""

    def __init__(self, name: str = "f1", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.parts = keras.metrics.Precision(), keras.metrics.Recall()
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        for part in self.parts:
            part.update_state(y_true > 0, y_pred > 0.5)
        precision, recall = (part.result() for part in self.parts)
        self.value.assign(2 * precision * recall / (precision + recall + 1e-6))

    def result(self) -> Any:
        return self.value


def sum_of_squares(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sum(keras.ops.square(y_true - y_pred))


@pytest.mark.once
def test_values_of_the_frame_show_what_cannot_be_trained(spark: Any, store: Any) -> None:
    """The schema determines the shapes, so zeros are tried before the rows are written."""
    frame = plane_rows(spark)
    frame = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    multiplied = Multiplied()
    multiplied.factor = 10.0
    multiplied(np.zeros((1, 2)))
    for wrong, message in (
        ({"loss": sum_of_squares}, "loss: expected a mean over rows .* found a sum"),
        ({"metrics": [Precise()]}, "metrics: the state of 'f1' .* cannot be added up"),
        ({"model": multiplied}, "model: a copy .* returns other outputs"),
    ):
        with pytest.raises(ParamError, match=message):
            make_estimator(store, **wrong).fit(frame)


@pytest.mark.once
@pytest.mark.parametrize("compress", others_in_soak(True, False))
def test_sparse_vectors_weights_and_a_row_transformation(
    spark: Any, store: Any, compress: bool
) -> None:
    rows = [
        (
            Vectors.sparse(3, {index % 3: 2.0}) if index % 4 else Vectors.sparse(3, {}),
            float(index % 5),
            1.0 + index % 2,
        )
        for index in range(40)
    ]
    frame = spark.createDataFrame(rows, ["sparse", "y", "weight"]).repartition(2)

    def halve(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "y": row["y"] / 2}

    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    fitted = make_estimator(
        store,
        Derived,
        num_proc=1,
        model=net,
        feature_cols=["sparse"],
        sample_weight_col="weight",
        batch_size=40,
        compress_sparse_cols=compress,
        transformation_fn=halve if compress else None,
        inmemory_cache_all=True,
        tensorflow_dataset_prefetch_buffer_size=1,
        optimizer="sgd",
    ).fit(frame)
    dense = np.array([row[0].toArray() for row in rows])
    labels = np.array([row[1] for row in rows])[:, None] / (2 if compress else 1)
    net.compile("sgd", "mse")
    net.fit(dense, labels, sample_weight=np.array([r[2] for r in rows]), batch_size=40, verbose=0)
    for a, b in zip(fitted.getModel().weights, net.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)
    metadata = fitted._get_metadata()["sparse"]
    assert (metadata["shape"], metadata["is_sparse_vector_only"]) == ([3], compress)
    predicted = fitted.setOutputCols(["out"]).transform(frame).select("sparse", "out").collect()
    found = np.array([row["out"] for row in predicted])
    inputs = np.array([row["sparse"].toArray() for row in predicted])
    np.testing.assert_allclose(found, net.predict(inputs, verbose=0)[:, 0], rtol=1e-4, atol=1e-5)


def test_a_model_predicts_without_a_fit(spark: Any) -> None:
    frame = spark.createDataFrame([(1.0, [1.0, 2.0]), (2.0, [3.0, 4.0])], ["a", "v"])
    a, v = keras.Input((1,)), keras.Input((2,))
    outer = keras.layers.Lambda(lambda x: x[:, :, None] * x[:, None, :], output_shape=(2, 2))
    net = keras.Model([a, v], [keras.layers.Rescaling(2.0)(a), v, outer(v)])
    model = KerasModel(model=net, feature_columns=["a", "v"], outputCols=["n", "w", "m"])
    predicted = model.transform(frame)
    types = dict(predicted.dtypes)
    assert (types["n"], types["w"], types["m"]) == ("double", "vector", "array<array<double>>")
    rows = predicted.select("n", "w", "m").collect()
    assert [row["n"] for row in rows] == [2.0, 4.0]
    assert [list(row["w"].toArray()) for row in rows] == [[1.0, 2.0], [3.0, 4.0]]
    assert rows[1]["m"] == [[9.0, 12.0], [12.0, 16.0]]
