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

from hvd_estimators.fitting import mlflow as tracking
from hvd_estimators.fitting.mlflow import Tracking, active_run
from hvd_estimators.torch import TorchEstimator, TorchModel

LOG_MODEL = Tracking._log_model


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
        Tracking, "_log_model", lambda self, model, *_: logged.append((model, self._run_id))
    )
    return logged


def rows(epoch: int, loss: float) -> list[Any]:
    names = ("top-5 %", "val_auc")
    return [(epoch, "train", "loss", loss), *((epoch, "validation", n, loss + 1) for n in names)]


def metrics(client: Any, run_id: str, key: str = "train/loss") -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run_id, key)]


def complete(tracked: Tracking, history: Any = (), model: Any = "model") -> None:
    tracked.complete(history, model, lambda: None)


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
        tracked = Tracking(
            active_run(),
            "mine",
            {**{f"p{n}": n for n in range(120)}, **params},
            own_run=False,
        )
        tracked.start()
        tracked.put(rows(0, 0.5))
        tracked.put(rows(1, 0.25))
        # Epoch 2 was not reported during training.
        complete(tracked, [*rows(0, 0.5), *rows(1, 0.25), *rows(2, 0.125)])
    found = client.get_run(run.info.run_id)
    assert found.data.params["model"] == "my own"
    assert found.data.params["batch_size"] == "8"
    assert found.data.params["list"] == "[1, null]"
    assert len(found.data.params["long"]) == 500
    assert len(found.data.params) == 125
    for name in ("loss", "train/loss"):
        assert metrics(client, run.info.run_id, name) == [(0, 0.5), (1, 0.25), (2, 0.125)]
    for name in ("val_top-5 _", "validation/top-5 _", "val_auc", "validation/val_auc"):
        assert metrics(client, run.info.run_id, name)[0] == (0, 1.5)
    assert len(found.data.metrics) == 6
    assert models == [("model", run.info.run_id)]
    assert found.info.status == "FINISHED"


def test_fits_in_threads_use_separate_runs(client: Any, models: list[Any]) -> None:
    with mlflow.start_run() as run:
        within = active_run()
        go_on = threading.Barrier(4)

        def fit(number: int) -> None:
            assert active_run() is None  # the active run belongs to the thread that started it
            tracked = Tracking(within, f"fit-{number}", {"number": number}, own_run=True)
            tracked.start()
            for epoch in range(5):
                go_on.wait(30)
                tracked.put(rows(epoch, number * 100 + epoch))
            if number:
                complete(tracked)
            else:
                tracked.fail()

        threads = [threading.Thread(target=fit, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        # The best model is fitted again in the run itself; a second such fit gets a child run.
        complete(Tracking(within, "best", {"number": 9}, own_run=False), rows(0, 9.0), "best")
        complete(Tracking(within, "second", {"number": 10}, own_run=False), rows(0, 10.0), "second")
        # The first fit resumes.
        complete(
            Tracking(within, "best", {"number": 9}, own_run=False), [*rows(0, 9.0), *rows(1, 8.0)]
        )
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
        tracked = Tracking(active_run(), "mine", {"a": 1}, own_run=False)
        tracked.start()
        tracked.put(rows(0, 0.5))
        complete(tracked)
    assert models == []
    assert caplog.text.count("metrics could not be written (ConnectionError") == 1
    assert caplog.text.count("lacks metrics of run 'mine'") == 1
    assert "MARKED" not in caplog.text
    assert "https://***@host" in caplog.text


def test_fit_does_not_wait_for_an_unresponsive_server(
    client: Any,
    models: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(tracking, "_SECONDS_AT_END", 0.01)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", lambda *_, **__: answer.wait(30))
    with caplog.at_level(logging.WARNING), mlflow.start_run():
        tracked = Tracking(active_run(), "mine", {"a": 1}, own_run=False)
        tracked.start()
        tracked.put(rows(0, 0.5))
        complete(tracked)
        answer.set()
    assert models == []
    assert "lacks metrics of run 'mine'" in caplog.text


def test_epochs_the_server_rejected_are_logged_at_the_end(
    client: Any, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_batch = mlflow.MlflowClient.log_batch
    failed = threading.Event()

    def fail_once(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("metrics") and not failed.is_set():
            failed.set()
            raise ConnectionError("no server")
        log_batch(*args, **kwargs)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail_once)
    with mlflow.start_run() as run:
        tracked = Tracking(active_run(), "mine", {"a": 1}, own_run=False)
        tracked.put(rows(0, 0.5))
        assert failed.wait(30)
        tracked.put(rows(1, 0.25))
        complete(tracked, [*rows(0, 0.5), *rows(1, 0.25)])
    assert sorted(metrics(client, run.info.run_id)) == [(0, 0.5), (1, 0.25)]
    assert [model for model, _ in models] == ["model"]


def test_failing_to_log_the_model_costs_a_warning(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ImportError("no module named mlflow.spark")

    monkeypatch.setattr(Tracking, "_log_model", fail)
    with caplog.at_level(logging.WARNING), mlflow.start_run() as run:
        complete(Tracking(active_run(), "mine", {}, own_run=False), rows(0, 0.5))
    assert metrics(client, run.info.run_id) == [(0, 0.5)]
    assert "the model was not logged (ImportError: no module named mlflow.spark)" in caplog.text
    assert 'Run: pip install "<clone or wheel of hvd_estimators>[mlflow]"' in caplog.text


def test_models_of_users_classes_are_logged_as_spark_models(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MyModel(TorchModel):
        pass

    logged: list[dict[str, Any]] = []
    spark = types.ModuleType("mlflow.spark")
    spark.log_model = lambda model, **options: logged.append({"model": model, **options})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow.spark", spark)
    monkeypatch.setattr(Tracking, "_log_model", LOG_MODEL)
    model = MyModel(model=torch.nn.Linear(1, 1), feature_columns=["x"], label_columns=["y"])
    with mlflow.start_run():
        complete(Tracking(active_run(), "mine", {}, own_run=False), rows(0, 0.5), model)
    (options,) = logged
    assert options["model"].stages == [model]
    assert options["artifact_path"] == "hvd_estimators_model"
    assert f"pyspark=={pyspark.__version__}" in options["pip_requirements"]
    # This file defines the class.
    assert __file__ in options["code_paths"]


class Told(TorchEstimator):
    """Estimator whose fit only returns its tracking."""

    def fit(self, dataset: Any, params: Any = None) -> Any:
        return self._make_tracking("mine", {})


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
