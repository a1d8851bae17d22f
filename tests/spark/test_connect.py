"""Launching, fits, predictions and saving over Spark Connect, where the driver has no JVM.

NumPy, or a single process, computes the expected values.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from servers.connect import SLOTS
from servers.driver import Application

from hvd_estimators.exceptions import (
    DataError,
    DependencyError,
    JobCancelledError,
    ParamError,
    SlotsError,
    StoreError,
    WorkerFailedError,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WEIGHTS = np.array([1.0, -2.0, 3.0, 0.5])
ROWS = 600


def setup_module() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def session() -> Any:
    from pyspark.sql import SparkSession

    return SparkSession.active()


def ranks_and_sum(text: str) -> tuple[int, int, float, int]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    print("one line")
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), float(total), len(text)


def linear_rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, len(WEIGHTS)))
    return x, x @ WEIGHTS


def linear_frame(column: str = "the x") -> Any:
    from pyspark.ml.linalg import Vectors

    x, y = linear_rows()
    rows = [(Vectors.dense(x[i].tolist()), float(y[i]), i) for i in range(ROWS)]
    return session().createDataFrame(rows, [column, "y", "id"])


def linear_estimator(folder: str, **params: Any) -> Any:
    import torch

    from hvd_estimators import Store
    from hvd_estimators.torch import TorchEstimator

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(len(WEIGHTS), 1), torch.nn.Flatten(0))
    given = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["the x"],
        "label_cols": ["y"],
        "epochs": 4,
        "batch_size": 15,
        "num_proc": 2,
        "store": Store.create(folder),
        "validation": 0.2,
        "random_seed": 1,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **params})


def predictions(model: Any, column: str) -> np.ndarray:
    rows = model.transform(linear_frame()).select("id", column).collect()
    return np.array([row[1] for row in sorted(rows)])


def further_ways(model: Any, folder: str) -> dict[str, Any]:
    """Return a model's predictions for nulls, in SQL and on a stream."""
    from pyspark.sql import functions as F

    frame = linear_frame()
    # The column is lazy: it is computed only on request.
    failing = F.when(F.raise_error(F.lit("it is computed")).isNull(), F.col("the x"))
    predicted = model.transform(frame.withColumn("the x", failing))
    with pytest.raises(Exception, match="it is computed"):
        predicted.collect()
    of_null = model.transform(
        frame.where("id = 0").withColumn("the x", F.when(F.lit(False), F.col("the x")))
    )
    model.as_udf("linear")
    frame.createOrReplaceTempView("rows")
    in_sql = session().sql("select id, linear(`the x`) from rows").collect()
    frame.coalesce(1).write.parquet(f"{folder}/rows")
    stream = session().readStream.schema(frame.schema).parquet(f"{folder}/rows")
    query = model.transform(stream).writeStream.format("memory").queryName("predicted")
    assert query.trigger(availableNow=True).start().awaitTermination(60)
    streamed = session().table("predicted").select("id", "y__output").collect()
    return {
        "of null": of_null.head()["y__output"],
        "in sql": np.array([row[1] for row in sorted(in_sql)]),
        "of a stream": np.array([row[1] for row in sorted(streamed)]),
    }


@pytest.mark.once
def test_run_gives_every_rank_a_task_for_calls_of_any_size(connect: Application) -> None:
    def job() -> Any:
        from hvd_estimators import run

        found = [run(ranks_and_sum, ("a",), num_proc=2)]
        # Larger than what PySpark sends with a classic job.
        found.append(run(ranks_and_sum, ("a" * 3_000_000,), num_proc=2))
        with pytest.raises(ParamError, match="Set num_proc to the number of ranks"):
            run(ranks_and_sum, ("a",))
        return found

    small, large = connect.run(job)
    assert small == [(0, 2, 3.0, 1), (1, 2, 3.0, 1)]
    assert large == [(0, 2, 3.0, 3_000_000), (1, 2, 3.0, 3_000_000)]


def test_failures_of_ranks_are_reported(connect: Application) -> None:
    def failing() -> None:
        raise ValueError("as it must be")

    def killed() -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    def job(fn: Any) -> Any:
        from hvd_estimators import run

        return run(fn, num_proc=2)

    with pytest.raises(WorkerFailedError, match="as it must be") as raised:
        connect.run(job, failing)
    assert raised.value.rank in (0, 1)
    with pytest.raises(WorkerFailedError, match="killed by SIGKILL"):
        connect.run(job, killed)


def test_more_ranks_than_slots_fail_after_the_start_timeout(connect: Application) -> None:
    def job() -> None:
        from hvd_estimators import run

        run(ranks_and_sum, ("a",), num_proc=SLOTS + 1, start_timeout=5)

    started = time.monotonic()
    with pytest.raises(SlotsError, match="not free within 5 seconds"):
        connect.run(job)
    assert time.monotonic() - started < 120  # Spark alone would wait for ten minutes


def test_interrupting_the_users_tag_cancels_the_ranks(connect: Application) -> None:
    def job(marker: str) -> None:
        import threading

        from hvd_estimators import run

        def waiting() -> None:
            Path(marker).touch()
            time.sleep(100)

        def interrupt() -> None:
            while not Path(marker).exists():
                time.sleep(0.1)
            spark.interruptTag("mine")

        spark = session()
        spark.addTag("mine")
        threading.Thread(target=interrupt).start()
        try:
            run(waiting, num_proc=2)
        finally:
            spark.removeTag("mine")

    with pytest.raises(JobCancelledError):
        connect.run(job, str(connect.folder / "begun"))


def test_fitting_saving_and_loading(connect: Application, spark: Any) -> None:
    def job(folder: str) -> Any:
        from pyspark.ml import Pipeline, PipelineModel

        from hvd_estimators.torch import TorchEstimator, TorchModel

        estimator = linear_estimator(f"{folder}/store")
        model = estimator.fit(linear_frame())
        found = {
            "weights": model.getModel()[0].weight.detach().numpy()[0],
            "history": model.getHistory(),
            "predicted": predictions(model, "y__output"),
            **further_ways(model, folder),
        }
        with pytest.raises(DataError, match="DataFrame is empty"):
            estimator.fit(linear_frame().where("id < 0"))
        for _ in range(2):
            model.write().overwrite().save(f"{folder}/model")
        found["loaded"] = predictions(TorchModel.load(f"{folder}/model"), "y__output")
        try:
            model.save(f"{folder}/model")
        except StoreError as error:
            found["exists"] = str(error)
        estimator.save(f"{folder}/estimator")
        found["params"] = TorchEstimator.load(f"{folder}/estimator").getBatchSize()
        pipeline = Pipeline(stages=[linear_estimator(f"{folder}/store")]).fit(linear_frame())
        pipeline.write().overwrite().save(f"{folder}/pipeline")
        loaded = PipelineModel.load(f"{folder}/pipeline")
        found["pipeline"] = predictions(loaded, "y__output")
        return found

    from hvd_estimators.torch import TorchModel

    found = connect.run(job, str(connect.folder / "fit"), timeout=560)
    _, y = linear_rows()
    np.testing.assert_allclose(found["weights"], WEIGHTS, atol=1e-3)
    losses = [epoch["validation"]["loss"] for epoch in found["history"]]
    assert len(losses) == 4
    assert losses[0] > losses[1] > losses[-1]
    assert losses[-1] < 1e-6
    np.testing.assert_allclose(found["predicted"], y, atol=1e-2)
    assert found["of null"] is None
    for other in ("loaded", "pipeline", "in sql", "of a stream"):
        np.testing.assert_array_equal(found[other], found["predicted"])
    # A session with a JVM loads the model, too.
    loaded = TorchModel.load(str(connect.folder / "fit" / "model")).getModel()
    np.testing.assert_array_equal(loaded[0].weight.detach().numpy()[0], found["weights"])
    assert "exists" in found["exists"]
    assert found["params"] == 15


def test_an_estimator_trains_on_prepared_data(connect: Application) -> None:
    def job(folder: str) -> Any:
        from hvd_estimators import Store, prepare_data

        store = Store.create(folder)
        with prepare_data(
            2, store, linear_frame(), label_columns=["y"], feature_columns=["the x"], validation=0.2
        ) as index:
            model = linear_estimator(folder).fit_on_parquet(dataset_idx=index)
        return model.getModel()[0].weight.detach().numpy()[0]

    weights = connect.run(job, str(connect.folder / "prepared"))
    np.testing.assert_allclose(weights, WEIGHTS, atol=1e-3)


def test_an_estimator_trains_on_a_table(connect: Application) -> None:
    def job(folder: str) -> Any:
        x, y = linear_rows()
        rows = [(x[i].tolist(), float(y[i]), "a b" if i % 3 else "c/d") for i in range(ROWS)]
        frame = session().createDataFrame(rows, ["the x", "y", "part"])
        frame.write.partitionBy("part").saveAsTable("linear", path=f"{folder}/linear")
        estimator = linear_estimator(f"{folder}/store", validation=None)
        with pytest.raises(ParamError, match=r"where: Spark cannot choose rows .* \[UNRESOLVED"):
            estimator.fit_on_table("linear", "nothing > 1")
        with pytest.raises(ParamError, match=r"found 'no_table', and Spark says: \[TABLE_OR_VIEW"):
            estimator.fit_on_table("no_table")
        model = estimator.fit_on_table("linear", validation_where="part = 'c/d'")
        return model.getModel()[0].weight.detach().numpy()[0], model.summary.validation_rows

    weights, validation_rows = connect.run(job, str(connect.folder / "tables"))
    np.testing.assert_allclose(weights, WEIGHTS, atol=1e-3)
    assert validation_rows == ROWS // 3


def test_a_thread_without_a_session_is_an_error(connect: Application) -> None:
    def job() -> Any:
        import threading

        from hvd_estimators import run

        raised = []

        def call() -> None:
            try:
                run(ranks_and_sum, ("a",), num_proc=1)
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        raise raised[0]

    with pytest.raises(DependencyError, match="InheritableThread"):
        connect.run(job)
