"""Bad input raises a typed error on the driver and leaves no files or processes."""

from __future__ import annotations

import datetime
import os
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import wait_until
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

from hvd_estimators import Store, clear_prepared_data, clear_training_cache
from hvd_estimators.exceptions import (
    ColumnError,
    DataError,
    ParamError,
    ShapeError,
    SlotsError,
    StoreError,
    WorkerFailedError,
)
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.launch.warm.server import NAME
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.spark


def make_estimator(store: Any, width: int = 1, **params: Any) -> TorchEstimator:
    net = params.pop("model", None) or torch.nn.Linear(width, 1)
    return TorchEstimator(
        **{
            "num_proc": 2,
            "store": store,
            "model": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "loss": torch.nn.functional.mse_loss,
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "input_shapes": [[-1, width]],
            "verbose": 0,
            **params,
        }
    )


def numbers(spark: Any, rows: int = 20) -> Any:
    return spark.range(rows).select(
        F.col("id").cast("double").alias("x"), (F.col("id") * 2.0).alias("y")
    )


def assert_nothing_written(store: Any) -> None:
    """Assert that the store holds only the empty folder of runs."""
    runs = Path(store.get_runs_path())
    assert [path for path in Path(store.prefix_path).rglob("*") if path != runs] == []


def rank_processes() -> list[psutil.Process]:
    """Return the ranks that these tests started, without other ranks on the machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "name"]):
        is_rank = "hvd_estimators.launch.rank.worker" in " ".join(process.info["cmdline"] or [])
        started_by = (process.info["environ"] or {}).get("TORCH_TESTS_OF_HVD_ESTIMATORS")
        # The process from which ranks are forked stays.
        if is_rank and started_by == str(os.getpid()) and process.info["name"] != NAME:
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"feature_cols": ["z"]}, "feature_cols"),
        ({"label_cols": ["z"]}, "label_cols"),
        ({"sample_weight_col": "z"}, "sample_weight_col"),
        ({"validation": "z"}, "validation"),
    ],
)
def test_a_missing_column_is_named_with_its_param(
    spark: Any, store: Any, params: dict[str, Any], name: str
) -> None:
    with pytest.raises(ColumnError, match=f"{name}.*'z'"):
        make_estimator(store, **params).fit(numbers(spark))
    assert_nothing_written(store)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("text", "StringIndexer"),
        (datetime.date(2026, 1, 1), "datediff"),
        (datetime.datetime(2026, 1, 1), "unix_timestamp"),
        (["a", "b"], "StringIndexer"),
        (bytearray(b"raw"), "decode it"),
        ({"a": 1}, "convert it"),
    ],
)
def test_a_column_of_the_wrong_type_is_rejected_with_a_remedy(
    spark: Any, store: Any, value: Any, remedy: str
) -> None:
    frame = spark.createDataFrame([(value, 1.0)], ["x", "y"])
    with pytest.raises(ColumnError, match=f"'x' has type .*{remedy}"):
        make_estimator(store).fit(frame)
    assert_nothing_written(store)


DEEP = "x array<array<array<double>>>, y double"


@pytest.mark.parametrize(
    ("schema", "good", "bad", "message"),
    [
        ("x double, y double", (1.0, 1.0), (None, 1.0), "'x' holds 1 nulls"),
        ("x double, y double", (1.0, 1.0), (1.0, None), "'y' holds 1 nulls"),
        ("x array<double>, y double", ([1.0], 1.0), (None, 1.0), "'x' holds 1 nulls"),
        ("x array<double>, y double", ([1.0], 1.0), ([None], 1.0), "'x' holds 1 nulls"),
        ("x array<double>, y double", ([1.0], 1.0), ([1.0, 2.0], 1.0), "'x' is ragged.*1 to 2"),
        (
            DEEP,
            ([[[1.0] * 2] * 2], 1.0),
            ([[[1.0] * 3, [1.0]]], 1.0),
            "from 1 to 3 elements within",
        ),
        (
            DEEP,
            ([[[1.0]] * 2] * 2, 1.0),
            ([[[1.0]] * 3, [[1.0]]], 1.0),
            "from 1 to 3 elements within",
        ),
        (DEEP, ([[[1.0]] * 2], 1.0), ([[[1.0], None]], 1.0), "'x' holds 1 nulls"),
    ],
)
def test_nulls_and_ragged_arrays_are_rejected(
    spark: Any, store: Any, schema: str, good: Any, bad: Any, message: str
) -> None:
    frame = spark.createDataFrame([good, bad, good], schema)
    with pytest.raises(DataError, match=message):
        make_estimator(store).fit(frame)
    assert_nothing_written(store)


def test_ragged_and_null_vectors_are_rejected(spark: Any, store: Any) -> None:
    vectors = [(Vectors.dense([1.0]), 1.0), (Vectors.dense([1.0, 2.0]), 1.0)]
    with pytest.raises(DataError, match="'x' is ragged"):
        make_estimator(store).fit(spark.createDataFrame(vectors, ["x", "y"]))
    frame = spark.createDataFrame([(Vectors.dense([1.0]), 1.0), (None, 1.0)], ["x", "y"])
    with pytest.raises(DataError, match="'x' holds 1 nulls"):
        make_estimator(store).fit(frame)
    assert_nothing_written(store)


def test_an_empty_frame_is_rejected(spark: Any, store: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        make_estimator(store).fit(numbers(spark).where("1 = 0"))
    with pytest.raises(DataError, match="no rows to train on"):
        make_estimator(store, validation="y").fit(numbers(spark).where("y > 0"))
    assert_nothing_written(store)


def test_fewer_rows_than_ranks_are_rejected(spark: Any, store: Any) -> None:
    with pytest.raises(DataError, match="1 rows, fewer than the 2 ranks"):
        make_estimator(store).fit(numbers(spark, 1))
    assert clear_prepared_data(store) == []
    assert_nothing_written(store)


def test_a_null_in_the_validation_column_is_rejected(spark: Any, store: Any) -> None:
    frame = numbers(spark).withColumn("held_out", F.when(F.col("x") > 3, F.col("x") > 10))
    with pytest.raises(DataError, match=r"validation.*4 nulls"):
        make_estimator(store, validation="held_out").fit(frame)
    assert_nothing_written(store)


def test_mismatched_shapes_are_rejected_before_training(spark: Any, store: Any) -> None:
    frame = numbers(spark)
    with pytest.raises(ShapeError, match=r"input_shapes=\(\(-1, 3\),\)"):
        make_estimator(store, width=3).fit(frame)
    with pytest.raises(ShapeError, match="cannot take the feature columns"):
        make_estimator(store, width=3, input_shapes=None).fit(frame)
    with pytest.raises(ShapeError, match=r"output \((\d+), 2\), label \(\1,\)") as raised:
        make_estimator(store, model=torch.nn.Linear(1, 2)).fit(frame)
    # The cause is torch's error, without a second error from the dry run on zeros.
    assert not isinstance(raised.value.__cause__.__context__, ShapeError)
    assert raised.value.__context__ is raised.value.__cause__
    with pytest.raises(ShapeError, match="1 outputs, and there are 2 label"):
        make_estimator(store, label_cols=["y", "x"]).fit(frame)
    assert_nothing_written(store)


def test_more_ranks_than_task_slots_are_rejected_at_once(spark: Any, store: Any) -> None:
    started = time.monotonic()
    with pytest.raises(SlotsError, match=r"num_proc: 9 ranks.*has 3"):
        make_estimator(store, num_proc=9).fit(numbers(spark))
    assert time.monotonic() - started < 30
    assert_nothing_written(store)


def test_a_store_without_write_access_is_rejected(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = Store.create(str(tmp_path / "file" / "store"))
    with pytest.raises(StoreError, match="prefix_path"):
        make_estimator(store).fit(numbers(spark))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"model": None, "optimizer": None}, "model is not set"),
        ({"loss": None}, "loss or loss_constructors"),
        ({"loss_constructors": [torch.nn.MSELoss]}, "loss or loss_constructors"),
        ({"loss_weights": [1.0, 2.0]}, "loss_weights: expected one per label, 1, found 2"),
        ({"backend": SparkBackend(2)}, "backend and num_proc"),
        ({"data_module": "csv"}, "data_module.*'csv'"),
        ({"run_id": "a/b"}, "run_id"),
        ({"validation": 1.5}, "validation.*1.5"),
        ({"sample_weight_col": "y", "loss": lambda a, b: (a - b).mean()}, "reduction"),
    ],
)
def test_params_are_checked_together(
    spark: Any, store: Any, params: dict[str, Any], message: str
) -> None:
    estimator = make_estimator(store)
    for name, value in params.items():
        estimator._set(**{name: value})
    with pytest.raises(ParamError, match=message):
        estimator.fit(numbers(spark))
    assert_nothing_written(store)


def test_batch_normalization_on_a_single_row_is_rejected(spark: Any, store: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    with pytest.raises(DataError, match="batch_size=1"):
        make_estimator(store, model=net, batch_size=1, num_proc=1).fit(numbers(spark, 9))


def test_an_error_on_one_rank_reaches_the_driver_with_its_traceback(spark: Any, store: Any) -> None:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        import os

        if os.environ.get("HOROVOD_RANK") == "1":
            raise ArithmeticError("only on rank 1")
        return torch.nn.functional.mse_loss(output, label)

    with pytest.raises(WorkerFailedError, match="only on rank 1") as caught:
        make_estimator(store, loss=loss).fit(numbers(spark))
    assert caught.value.rank == 1
    assert "ArithmeticError" in str(caught.value)
    assert "in loss" in str(caught.value)
    assert rank_processes() == []
    # The prepared data is no longer in use.
    clear_training_cache()
    assert [path.name for path in Path(store.prefix_path).iterdir() if path.name != "runs"] == []


def test_a_killed_rank_is_reported_and_all_ranks_end(spark: Any) -> None:
    def run() -> None:
        import os
        import signal
        import time as clock

        if os.environ["HOROVOD_RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        clock.sleep(600)

    started = time.monotonic()
    with pytest.raises(WorkerFailedError, match="SIGKILL") as caught:
        SparkBackend(2).run(run)
    assert caught.value.rank == 0
    assert time.monotonic() - started < 60
    assert rank_processes() == []


def test_ranks_end_when_their_job_is_cancelled(spark: Any, tmp_path: Path) -> None:
    import threading

    marker = str(tmp_path / "started")

    def run() -> None:
        import pathlib
        import time as clock

        pathlib.Path(marker).touch()
        clock.sleep(600)

    seen: list[psutil.Process] = []

    def cancel() -> None:
        while not Path(marker).exists():
            time.sleep(0.1)
        seen.extend(rank_processes())
        spark.sparkContext.cancelAllJobs()

    threading.Thread(target=cancel, daemon=True).start()
    with pytest.raises(Exception, match="cancelled"):
        SparkBackend(2).run(run)
    assert seen
    deadline = time.monotonic() + 30
    while rank_processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert rank_processes() == []


def test_start_timeout_limits_the_wait_for_occupied_slots(spark: Any, tmp_path: Path) -> None:
    import threading

    def hold(batches: Any) -> Any:
        (tmp_path / f"{os.getpid()}").touch()
        while not (tmp_path / "go on").exists():
            time.sleep(0.05)
        yield from batches

    def occupy() -> None:
        spark.range(0, 3, 1, 3).mapInArrow(hold, "id long").collect()

    holder = threading.Thread(target=occupy)
    holder.start()
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        with pytest.raises(SlotsError, match="Timed out waiting for Spark tasks to start"):
            SparkBackend(2, start_timeout=2).run(int)
    finally:
        (tmp_path / "go on").touch()
        holder.join()


def test_transform_rejects_wrong_columns_and_nulls(spark: Any) -> None:
    model = TorchModel(
        model=torch.nn.Linear(1, 1),
        feature_columns=["x"],
        label_columns=["y"],
        input_shapes=[[-1, 1]],
    )
    with pytest.raises(ColumnError, match=r"feature_columns.*'x'"):
        model.transform(spark.range(3))
    frame = numbers(spark).withColumn("y__output", F.lit(1))
    with pytest.raises(ColumnError, match="'y__output' already"):
        model.transform(frame)
    with pytest.raises(ParamError, match="1 outputs, found 2 names"):
        model.copy().setOutputCols(["a", "b"]).transform(numbers(spark))
    # One task: Spark may give the Python worker of a task killed beside it to the next job.
    frame = spark.createDataFrame([(None,)], "x double").coalesce(1)
    with pytest.raises(Exception, match="'x' holds nulls"):
        model.setHandleInvalid("error").transform(frame).collect()


def test_decimals_and_booleans_are_converted(spark: Any, store: Any) -> None:
    frame = spark.createDataFrame(
        [(Decimal("1.5"), True), (Decimal("2.5"), False)] * 4, "x decimal(10,2), y boolean"
    )
    model = make_estimator(store, num_proc=1).fit(frame)
    assert model.transform(frame).count() == 8
