"""run_id under Spark's validators: each fit has a separate run, which can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backends import InProcessBackend
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch import TorchEstimator

pytestmark = [pytest.mark.spark, pytest.mark.once]


def make_estimator(store: Any, **params: Any) -> TorchEstimator:
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    return TorchEstimator(
        **{
            "backend": InProcessBackend(),
            "store": store,
            "model": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "loss": torch.nn.functional.mse_loss,
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "input_shapes": [[1]],
            "random_seed": 1,
            "verbose": 0,
            **params,
        }
    )


def test_each_fit_of_a_cross_validator_has_a_separate_run(spark: Any, store: Any) -> None:
    # Two folds with the same number of rows.
    frame = spark.range(20).select(
        (F.col("id") / 20).alias("x"), (F.col("id") / 7).alias("y"), (F.col("id") % 2).alias("fold")
    )
    frame = frame.withColumn("fold", F.col("fold").cast("int")).coalesce(1)

    def validate(**params: Any) -> Any:
        estimator = make_estimator(store, **params)
        grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.1, 0.2]).build()
        evaluator = RegressionEvaluator(labelCol="y", predictionCol="y__output")
        validator = CrossValidator(
            estimator=estimator,
            estimatorParamMaps=grid,
            evaluator=evaluator,
            numFolds=2,
            foldCol="fold",
            collectSubModels=True,
        )
        return validator.fit(frame)

    fitted, plain = validate(run_id="cv"), validate()
    runs = [model.getRunId() for fold in fitted.subModels for model in fold]
    assert len(set(runs)) == 4
    assert all(run.startswith("cv-") for run in runs)
    assert fitted.bestModel.getRunId() == "cv"
    weights = [model.getModel().weight.item() for fold in fitted.subModels for model in fold]
    assert len(set(weights)) == 4
    assert weights == [m.getModel().weight.item() for fold in plain.subModels for m in fold]
    assert fitted.avgMetrics == plain.avgMetrics
    # Another validation finds the runs, and resumes them for more epochs.
    again = validate(run_id="cv", epochs=2)
    assert [model.getRunId() for fold in again.subModels for model in fold] == runs
    assert len(again.bestModel.getHistory()) == 2
    assert len(list(Path(store.get_runs_path()).glob("cv*"))) == 5
    # In a pipeline, no context tells the estimator which fits belong together.
    estimator = make_estimator(store, run_id="pipe")
    pipeline = Pipeline(stages=[estimator])
    with pytest.raises(ParamError, match=r"run_id: .*'pipe'.*learning_rate 0\.1 \(now 0\.2\)"):
        list(pipeline.fitMultiple(frame, [{estimator.learning_rate: r} for r in (0.1, 0.2)]))


def test_runs_recognize_the_same_rows_and_reject_others(spark: Any, store: Any) -> None:
    frame = spark.range(40).select(
        F.col("id").cast("double").alias("x"), F.rand(3).alias("y"), F.array("id").alias("a")
    )
    make_estimator(store, run_id="mine").fit(frame)
    # The same rows in another order and other partitions.
    shuffled = frame.repartition(3).orderBy(F.rand(5))
    assert len(make_estimator(store, run_id="mine", epochs=2).fit(shuffled).getHistory()) == 2
    other = frame.withColumn("y", F.when(F.col("x") == 7, 0.5).otherwise(F.col("y")))
    for given, params in ((other, {}), (frame, {"validation": 0.5})):
        with pytest.raises(ParamError, match=r"run_id: .*'mine'.*data: content of the rows"):
            make_estimator(store, run_id="mine", **params).fit(given)
