"""run_id under Spark's validators: each fit has a separate run, which can be resumed."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import InProcessBackend
from estimators import line_estimator
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch import TorchEstimator

pytestmark = [pytest.mark.spark, pytest.mark.once]


def make_estimator(store: Any, **params: Any) -> Any:
    return line_estimator(store, lr=0.1, **{"backend": InProcessBackend(), **params})


def test_each_fit_of_a_cross_validator_has_a_separate_run(
    spark: Any, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
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

    fitted = validate(run_id="cv")
    assert not capsys.readouterr().err
    plain = validate(verbose=1)
    # The two fits of a fold share its data. The best params are fitted to all rows.
    shown = capsys.readouterr().err
    written, rows = re.findall(r"^Wrote .* s: (\d+) training rows, \d+", shown, re.M), ["10"] * 2
    assert written == [*rows, "20"]
    reused = re.findall(r"^Reusing prepared data \w+: (\d+) training rows, \d+", shown, re.M)
    assert reused == rows
    assert len(re.findall(r"^Started 1 process in ", shown, re.M)) == 5
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


@pytest.mark.soak
def test_a_search_over_the_size_of_the_network_and_the_rate(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    """Grid over a function's arguments; every candidate equals a fit of objects."""
    frame = spark.range(20).select((F.col("id") / 20).alias("x"), (F.col("id") / 7).alias("y"))
    frame = frame.coalesce(1)
    sizes, rates = [2, 5], [0.1, 0.2]

    def network(hidden: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(1, hidden), torch.nn.Linear(hidden, 1))

    given = make_estimator(store, optimizer=partial(torch.optim.SGD, lr=0.5))
    given.setParams(model=network, model_args={"hidden": 1})
    given.save(str(tmp_path / "estimator"))
    estimator = TorchEstimator.load(str(tmp_path / "estimator"))
    estimator.setParams(backend=InProcessBackend())
    grid = (
        ParamGridBuilder()
        .addGrid(estimator.model_args, [{"hidden": hidden} for hidden in sizes])
        .addGrid(estimator.learning_rate, rates)
        .build()
    )
    validator = TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="y", predictionCol="y__output"),
        seed=1,
        collectSubModels=True,
    )
    fitted = validator.fit(frame)
    best = int(np.argmin(fitted.validationMetrics))

    for candidate, (hidden, rate) in enumerate(itertools.product(sizes, rates)):
        torch.manual_seed(1)  # the estimator's random_seed
        net = network(hidden)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        expected = make_estimator(store, model=net, optimizer=optimizer).fit(frame)
        found = fitted.subModels[candidate].getModel()
        assert found[0].out_features == hidden
        if candidate == best:
            found = fitted.bestModel.getModel()
            for a, b in zip(found.parameters(), expected.getModel().parameters(), strict=True):
                assert torch.equal(a, b)
    assert len(set(fitted.validationMetrics)) == 4
