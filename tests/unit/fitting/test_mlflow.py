"""Fits logged to MLflow, to a file store and to a failing server."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pyspark
import pytest
import torch

from hvd_estimators.fitting.fit import Fit
from hvd_estimators.fitting.mlflow import MlflowLogger, active_run
from hvd_estimators.fitting.run_loggers import RunLoggers
from hvd_estimators.loggers import LoggedRun
from hvd_estimators.torch import TorchEstimator, TorchModel

LOG_MODEL = MlflowLogger._log_model


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MLflow client of a temporary folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    yield mlflow.MlflowClient()
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record logged models with their active run instead of logging them."""
    logged: list[Any] = []
    monkeypatch.setattr(
        MlflowLogger, "_log_model", lambda self, model, *_: logged.append((model, self._run_id))
    )
    return logged


def values(loss: float) -> dict[str, float]:
    return {"loss": loss, "val_top-5 %": loss + 1, "val_auc": loss + 1}


def metrics(client: Any, run_id: str, key: str = "loss") -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run_id, key)]


def fit(
    name: str,
    epochs: dict[int, float],
    *,
    model: Any = "model",
    within: Any = None,
    params: Any = None,
    own_run: bool = False,
    status: str = "finished",
) -> None:
    """Log a fit as its record does."""
    entry = MlflowLogger(within or active_run(), params or {}, own_run)
    loggers = RunLoggers(LoggedRun(name, "0" * 40, min(epochs), {}), (), [entry])
    loggers.start()
    for epoch, loss in epochs.items():
        loggers.log({epoch: values(loss)})
    if status == "finished" and loggers.wait_for(entry):
        entry.log_model(model, lambda: None, max(epochs))
    loggers.finish(status)


def test_nothing_is_logged_without_an_active_run(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert active_run() is None
    with mlflow.start_run() as run:
        found = active_run()
        assert found is not None
        assert found.run_id == run.info.run_id
        monkeypatch.setattr(mlflow, "active_run", lambda: 1 / 0)
        assert active_run() is None
        # A program that has not imported MLflow has no active run.
        monkeypatch.delitem(sys.modules, "mlflow")
        assert active_run() is None


def test_params_metrics_and_model_are_logged_to_the_active_run(
    client: Any, models: list[Any]
) -> None:
    with mlflow.start_run() as run:
        mlflow.log_param("model", "my own")
        params = {"model": "Linear", "batch_size": 8, "list": [1, None], "long": "x" * 900}
        every = {**{f"p{n}": n for n in range(120)}, **params}
        fit("mine", {0: 0.5, 1: 0.25, 2: 0.125}, params=every)
    found = client.get_run(run.info.run_id)
    assert found.data.params["model"] == "my own"
    assert found.data.params["batch_size"] == "8"
    assert found.data.params["list"] == "[1, null]"
    assert len(found.data.params["long"]) == 500
    assert len(found.data.params) == 125
    assert metrics(client, run.info.run_id) == [(0, 0.5), (1, 0.25), (2, 0.125)]
    for name in ("val_top-5 _", "val_auc"):
        assert metrics(client, run.info.run_id, name)[0] == (0, 1.5)
    assert len(found.data.metrics) == 3
    assert models == [("model", run.info.run_id)]
    assert found.info.status == "FINISHED"


def test_fits_in_threads_use_separate_runs(client: Any, models: list[Any]) -> None:
    with mlflow.start_run() as run:
        within = active_run()
        go_on = threading.Barrier(4)

        def fit_one(number: int) -> None:
            assert active_run() is None  # the active run belongs to the thread that started it
            go_on.wait(30)
            epochs = {epoch: number * 100.0 + epoch for epoch in range(5)}
            status = "finished" if number else "failed"
            params = {"number": number}
            fit(f"fit-{number}", epochs, within=within, params=params, own_run=True, status=status)

        threads = [threading.Thread(target=fit_one, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        # The best model is fitted again in the run itself; a second such fit gets a child run.
        fit("best", {0: 9.0}, model="best", params={"number": 9})
        fit("second", {0: 10.0}, model="second", params={"number": 10})
        # The first fit resumes.
        fit("best", {1: 8.0}, params={"number": 9})
    runs = {r.data.params["number"]: r for r in client.search_runs([run.info.experiment_id])}
    assert sorted(runs) == ["0", "1", "10", "2", "3", "9"]
    for number in range(4):
        child = runs[f"{number}"]
        assert child.data.tags["mlflow.parentRunId"] == run.info.run_id
        assert child.data.tags["hvd_estimators.run_id"] == f"fit-{number}"
        assert child.info.status == ("FINISHED" if number else "FAILED")
        assert metrics(client, child.info.run_id) == [(e, number * 100 + e) for e in range(5)]
    assert runs["9"].info.run_id == run.info.run_id
    assert metrics(client, run.info.run_id) == [(0, 9.0), (1, 8.0)]
    assert runs["10"].data.tags["mlflow.parentRunId"] == run.info.run_id
    assert [model for model, _ in models] == ["best", "second", "model"]


def test_a_failing_server_costs_a_warning(
    client: Any,
    models: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no server at https://me:MARKED@host/api")

    with caplog.at_level(logging.WARNING), mlflow.start_run():
        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail)
        fit("mine", {0: 0.5})
    assert models == []
    assert caplog.text.count("start() of MlflowLogger failed: ConnectionError") == 1
    assert "MARKED" not in caplog.text
    assert "https://***@host" in caplog.text


def test_models_of_users_classes_are_logged_as_spark_models(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MyModel(TorchModel):
        pass

    logged: list[dict[str, Any]] = []
    spark = types.ModuleType("mlflow.spark")
    spark.log_model = lambda model, **options: logged.append({"model": model, **options})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow.spark", spark)
    monkeypatch.setattr(MlflowLogger, "_log_model", LOG_MODEL)
    model = MyModel(model=torch.nn.Linear(1, 1), feature_columns=["x"], label_columns=["y"])
    with mlflow.start_run():
        fit("mine", {0: 0.5}, model=model)
    (options,) = logged
    assert options["model"].stages == [model]
    assert options["artifact_path"] == "hvd_estimators_model"
    assert f"pyspark=={pyspark.__version__}" in options["pip_requirements"]
    # This file defines the class.
    assert __file__ in options["code_paths"]


class Told(TorchEstimator):
    """Estimator whose fit only returns its logger."""

    def fit(self, dataset: Any, params: Any = None) -> Any:
        return Fit(self).mlflow_logger()


def test_fits_of_a_grid_are_children_of_the_active_run(client: Any) -> None:
    net = torch.nn.Linear(1, 1)
    estimator = Told(model=net)
    assert estimator.fit(None) is None
    with mlflow.start_run() as run:
        fits = estimator.fitMultiple(None, [{}, {estimator.log_to_mlflow: False}])  # type: ignore[arg-type]
        found: list[Any] = []
        # As in a validator: a thread without an active run.
        thread = threading.Thread(target=lambda: found.extend(fits))
        thread.start()
        thread.join(30)
        (_, first), (_, second) = sorted(found)
        assert (first._within.run_id, first._own_run) == (run.info.run_id, True)
        assert second is None
        assert estimator.fit(None)._own_run is False
