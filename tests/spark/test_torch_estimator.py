"""TorchEstimator on Spark: fits, predictions and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.sql import functions as F
from variants import others_in_soak

from hvd_estimators import clear_training_cache, list_prepared_data, prepare_data
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.spark


def make_frame(spark: Any, rows: int = 200) -> Any:
    """Return rows of y = 2 a - 3 b + 1, with a column of rows to validate on."""
    return (
        spark.range(rows)
        .select(
            F.col("id"),
            ((F.col("id") * 37 % 101) / 101).alias("a"),
            ((F.col("id") * 53 % 103) / 103).alias("b"),
            (F.col("id") % 5 == 0).alias("held_out"),
        )
        .withColumn("y", 2 * F.col("a") - 3 * F.col("b") + 1)
    )


class TwoColumns(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.stack([a, b], dim=1))


def make_estimator(store: Any, net: torch.nn.Module, **params: Any) -> TorchEstimator:
    return TorchEstimator(
        **{
            "num_proc": 2,
            "store": store,
            "model": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "loss": torch.nn.functional.mse_loss,
            "feature_cols": ["features"],
            "label_cols": ["y"],
            "batch_size": 16,
            "random_seed": 1,
            "verbose": 0,
            **params,
        }
    )


def linear_net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def test_a_pipeline_fits_predicts_saves_and_loads(spark: Any, store: Any, tmp_path: Path) -> None:
    frame = make_frame(spark)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    estimator = make_estimator(
        store,
        linear_net(),
        epochs=40,
        validation="held_out",
        metrics=[torch.nn.functional.l1_loss],
    )
    pipeline = Pipeline(stages=[assembler, estimator])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    fitted = Pipeline.load(str(tmp_path / "pipeline")).fit(frame)

    model = fitted.stages[-1]
    assert isinstance(model, TorchModel)
    # The label is linear in the features, so the fit converges to its coefficients.
    weight = model.getModel().weight.detach().numpy().reshape(-1)
    np.testing.assert_allclose(weight, [2, -3], atol=0.05)
    history = model.getHistory()
    assert [record["epoch"] for record in history] == list(range(40))
    assert history[-1]["validation"]["loss"] < 1e-3 < history[0]["validation"]["loss"]
    assert set(history[0]["train"]["all_metrics"][0]) == {"l1_loss"}

    predicted = fitted.transform(frame)
    assert dict(predicted.dtypes)["y__output"] == "double"
    rows = predicted.select("a", "b", "y__output").collect()
    expected = [2 * row["a"] - 3 * row["b"] + 1 for row in rows]
    np.testing.assert_allclose([row["y__output"] for row in rows], expected, atol=0.05)

    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    assert again.transform(frame).select("y__output").collect() == [
        row[2:] for row in predicted.select("a", "b", "y__output").collect()
    ]
    # The weights are a plain torch file, usable without this package.
    (weights,) = (tmp_path / "fitted").glob("stages/1_*/weights.pt")
    state = torch.load(weights, weights_only=True)
    assert torch.equal(state["weight"], model.getModel().weight)
    assert again.stages[-1].getOptimizer().param_groups[0]["lr"] == 0.1
    # Prepared data is deleted; checkpoint and logs are kept.
    clear_training_cache()
    kept = sorted(path.name for path in Path(store.prefix_path).iterdir())
    assert kept == ["runs"]
    run = Path(store.get_run_path(model.getRunId()))
    assert list((run / "checkpoints").glob("checkpoint-*.ckpt"))
    assert list((run / "logs").glob("events.out.tfevents.*"))


class TwoOutputs(torch.nn.Module):
    """One number from two columns, and two numbers from vector, array and sparse columns."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Linear(2, 1)
        self.vector = torch.nn.Linear(2 + 3 + 4, 2)

    def forward(
        self,
        scalar: torch.Tensor,
        dense: torch.Tensor,
        array: torch.Tensor,
        sparse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.stack([scalar, dense[:, 0]], dim=1)
        return self.number(first), self.vector(torch.cat([dense, array, sparse], dim=1))


@pytest.mark.parametrize("compress", others_in_soak(True, False))
def test_scalars_vectors_arrays_and_sparse_columns_train_a_two_output_model(
    spark: Any, store: Any, compress: bool
) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for index in range(60):
        dense, array, hot = rng.normal(size=2), rng.normal(size=3), index % 4
        rows.append(
            (
                float(index % 7),
                DenseVector(dense),
                [float(value) for value in array],
                Vectors.sparse(4, {hot: 2.0}) if index % 3 else Vectors.sparse(4, {}),
                float(index % 5),
                DenseVector([dense.sum(), array.sum()]),
                1.0 + index % 2,
            )
        )
    names = ["scalar", "dense", "array", "sparse", "first", "second", "weight"]
    frame = spark.createDataFrame(rows, names).repartition(2)
    torch.manual_seed(0)
    net = TwoOutputs()
    estimator = make_estimator(
        store,
        net,
        feature_cols=["scalar", "dense", "array", "sparse"],
        label_cols=["first", "second"],
        loss=[torch.nn.MSELoss(), torch.nn.functional.l1_loss],
        loss_weights=[0.25, 2.0],
        sample_weight_col="weight",
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        batch_size=60,
        num_proc=1,
        compress_sparse_cols=compress,
    )
    model = estimator.fit(frame).setOutputCols(["number", "vector"])

    # One step of one process over all collected rows.
    torch.manual_seed(0)
    reference = TwoOutputs()
    inputs = [
        torch.tensor([row[0] for row in rows]),
        *(
            torch.tensor(
                np.array(
                    [np.asarray(getattr(r[i], "toArray", lambda r=r, i=i: r[i])()) for r in rows]
                ),
                dtype=torch.float32,
            )
            for i in (1, 2, 3)
        ),
    ]
    first, second = reference(*inputs)
    weight = torch.tensor([row[6] for row in rows])
    target = torch.tensor(np.array([row[5].toArray() for row in rows]), dtype=torch.float32)
    squared = (first.reshape(-1) - torch.tensor([row[4] for row in rows])) ** 2
    absolute = (second - target).abs().mean(dim=1)
    loss = 0.25 * (squared * weight).sum() / len(rows)
    loss = loss + 2.0 * (absolute * weight).sum() / len(rows)
    loss.backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= 0.01 * parameter.grad
    for found, expected in zip(model.getModel().parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert model.getHistory()[0]["train"]["loss"] == pytest.approx(loss.item(), rel=1e-5)

    predicted = model.transform(frame)
    types = dict(predicted.dtypes)
    assert types["number"] == "double"
    assert types["vector"] == "vector"
    collected = predicted.select("scalar", "dense", "array", "sparse", "number", "vector").collect()
    with torch.no_grad():
        number, vector = reference(
            torch.tensor([row["scalar"] for row in collected]),
            torch.tensor(np.array([row["dense"].toArray() for row in collected])).float(),
            torch.tensor(np.array([row["array"] for row in collected])).float(),
            torch.tensor(np.array([row["sparse"].toArray() for row in collected])).float(),
        )
    np.testing.assert_allclose(
        [row["number"] for row in collected], number.reshape(-1), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(
        np.array([row["vector"].toArray() for row in collected]), vector, rtol=1e-3, atol=1e-4
    )


def fail_to_list(store: Any, dataset_idx: str) -> int:
    raise StoreError("the store cannot list")


def test_prepared_data_is_usable_until_it_is_cleared(
    spark: Any, store: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = make_frame(spark, 100)
    net = TwoColumns()
    estimator = make_estimator(
        store, net, feature_cols=["a", "b"], num_proc=1, validation=0.3, epochs=1, verbose=1
    )
    with prepare_data(1, store, frame, ["y"], ["a", "b"], validation=0.3) as dataset_idx:
        assert store.exists(store.get_train_data_path(dataset_idx))
        (dataset,) = list_prepared_data(store)
        model = estimator.fit_on_parquet(dataset_idx=dataset_idx)
        of_fit = capsys.readouterr().err.splitlines()[0]
        with monkeypatch.context() as patch:
            patch.setattr("hvd_estimators.fitting.fit.dataset_bytes", fail_to_list)
            estimator.fit_on_parquet(dataset_idx=dataset_idx)
        without_size = capsys.readouterr().err.splitlines()[0]
    assert "validation" in model.getHistory()[0]
    rows = f"{dataset.rows} training and {dataset.validation_rows} validation rows"
    size = f"{dataset.num_bytes / 1000:.1f} kB"
    assert of_fit == f"Reusing prepared data {dataset_idx}: {rows}, {size}."
    assert without_size == f"Reusing prepared data {dataset_idx}: {rows}."
    clear_training_cache()
    assert not store.exists(store.get_train_data_path(dataset_idx))
    with pytest.raises(StoreError, match="no prepared dataset"):
        estimator.fit_on_parquet(dataset_idx=dataset_idx)


def test_transform_is_lazy_and_accepts_an_empty_frame(spark: Any) -> None:
    net = linear_net()
    model = TorchModel(
        model=net, feature_columns=["v"], label_columns=["y"], input_shapes=[[-1, 2]]
    )
    frame = spark.createDataFrame([(Vectors.dense([1.0, 2.0]),)], ["v"]).where("1 = 0")
    assert model.transform(frame).collect() == []
    failing = frame.select(F.assert_true(F.lit(False)), "v")
    assert "y__output" in model.transform(failing).columns


def test_higher_dimensional_outputs_and_chosen_types(spark: Any) -> None:
    class Outer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :, None] * x[:, None, :]

    frame = spark.createDataFrame([([1.0, 2.0],), ([3.0, 4.0],)], ["v"])
    model = TorchModel(
        model=Outer(), feature_columns=["v"], outputCols=["o"], input_shapes=[[-1, 2]]
    )
    assert [row["o"] for row in model.transform(frame).select("o").collect()] == [
        [[1.0, 2.0], [2.0, 4.0]],
        [[9.0, 12.0], [12.0, 16.0]],
    ]
    total = TorchModel(
        model=torch.nn.Identity(),
        feature_columns=["v"],
        outputCols=["o"],
        input_shapes=[[-1, 2]],
        output_types=["array<float>"],
        inference_batch_size=1,
    )
    assert dict(total.transform(frame).dtypes)["o"] == "array<float>"
    assert [row["o"] for row in total.transform(frame).select("o").collect()] == [
        [1.0, 2.0],
        [3.0, 4.0],
    ]


def test_torchscript_models_predict(spark: Any, store: Any) -> None:
    frame = make_frame(spark, 64)
    net = torch.jit.script(TwoColumns())
    with pytest.raises(ParamError, match="Train the module that it was made of"):
        make_estimator(store, net, feature_cols=["a", "b"], num_proc=1).fit(frame)
    model = TorchModel(
        model=net, feature_columns=["a", "b"], label_columns=["y"], input_shapes=[[-1], [-1]]
    )
    predicted = model.transform(frame).collect()
    found = [row["y__output"] for row in predicted]
    a, b = (torch.tensor([float(row[name]) for row in predicted]) for name in ("a", "b"))
    np.testing.assert_allclose(np.ravel(found), net(a, b).detach().ravel(), rtol=1e-5)
