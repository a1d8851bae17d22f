"""MLflow tracking of a fit: params, metrics during training, and the fitted model.

MLflow's active run belongs to a thread. A fit looks it up in the thread that calls `fit`, and all
threads then log to this run by its ID. Each fit of a grid gets a child run. So does a fit whose
active run already contains another fit. This package uses MLflow only if the program has imported
it. Runs on the driver.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.ml import PipelineModel, Transformer
from pyspark.ml.feature import SQLTransformer

from hvd_estimators.fitting.progress import EpochFeed
from hvd_estimators.store.redaction import redacted
from hvd_estimators.training.spec import HistoryRow

logger = logging.getLogger(__name__)

MODEL_NAME = "model"
"""Artifact path of the model."""

_RUN_TAG = "hvd_estimators.run_id"
_SECONDS_AT_END = 60.0
_LONGEST_PARAM = 500
_PACKAGES = {
    "keras": ("keras", "tensorflow"),
    "lightning": ("torch", "lightning", "pytorch-lightning"),
    "torch": ("torch",),
}

_lock = threading.Lock()
_written: dict[tuple[str, str], tuple[str, set[int]]] = {}
"""For each active MLflow run (URI and ID), this package's run ID and the logged epochs."""


@dataclass(frozen=True)
class TrackingRun:
    """MLflow run.

    Attributes
    ----------
    uri : str
        The tracking server, folder or database.
    run_id : str
        ID of the run.
    experiment_id : str
        ID of the run's experiment.
    """

    uri: str
    run_id: str
    experiment_id: str


def active_run() -> TrackingRun | None:
    """Return this thread's active MLflow run, or None if it has none or MLflow is not imported."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is None:
        return None
    try:
        active = mlflow.active_run()
        if active is None:
            return None
        return TrackingRun(mlflow.get_tracking_uri(), active.info.run_id, active.info.experiment_id)
    except Exception as error:
        logger.warning("MLflow: its active run is unknown (%s).", redacted(str(error)))
        return None


class Tracking:
    """Logger of one fit to MLflow.

    Exceptions from MLflow do not end the fit. Another thread logs the metrics. Only MLflow's own
    client retries requests; metrics of failed requests are logged again at the end. The fit then
    waits for that thread for at most one minute.

    Parameters
    ----------
    within : TrackingRun
        The active run.
    name : str
        The ``run_id`` of this fit.
    params : mapping
        The recorded params of the estimator.
    own_run : bool
        Whether the fit is part of a grid and gets a child run of the active run.
    """

    def __init__(
        self, within: TrackingRun, name: str, params: Mapping[str, Any], own_run: bool
    ) -> None:
        self._within = within
        self._name = name
        self._params = params
        self._is_grid = self._own_run = own_run
        if not own_run:
            with _lock:
                key = within.uri, within.run_id
                written = _written.setdefault(key, (name, set()))
            self._own_run = written[0] != name
        self._logged: set[int] = set() if self._own_run else written[1]
        self._run_id: str | None = None
        self._has_params = False
        self._feed = EpochFeed(self._log, f"MLflow ({redacted(within.uri)})")

    def start(self) -> None:
        """Log the params in another thread."""
        self._feed.put(())

    def put(self, rows: Sequence[HistoryRow]) -> None:
        """Log the rows of an epoch in another thread."""
        self._feed.put(rows)

    def fail(self) -> None:
        """Log the remaining metrics and close, after a failed fit."""
        if self._has_all(()) and self._own_run:
            self._end_own_run("FAILED")

    def complete(
        self,
        rows: Sequence[HistoryRow],
        model: Transformer,
        framework: str,
        versions: Mapping[str, str],
    ) -> None:
        """Log the fitted model as a Spark model, unless it belongs to a grid, and close.

        Parameters
        ----------
        rows : sequence of HistoryRow
            The whole history. Epochs that are not logged yet are logged from it.
        model : Transformer
            The fitted model.
        framework : str
            The model's framework.
        versions : mapping
            Package versions, by package name.
        """
        self._feed.put(rows)
        if not self._has_all(rows):
            return
        if not self._is_grid:
            try:
                self._log_model(model, framework, versions)
            except Exception as error:
                logger.warning(
                    "MLflow: the model was not logged (%s: %s). The fit is complete; "
                    "mlflow.spark.log_model(model, %r) logs it%s.",
                    type(error).__name__,
                    redacted(str(error)),
                    MODEL_NAME,
                    ", once mlflow is installed" if isinstance(error, ImportError) else "",
                )
        if self._own_run:
            self._end_own_run("FINISHED")

    def _log_model(self, model: Transformer, framework: str, versions: Mapping[str, str]) -> None:
        spark: Any = importlib.import_module("mlflow.spark")
        mlflow = sys.modules["mlflow"]
        packages = ("hvd_estimators", "pyspark", *_PACKAGES.get(framework, ()))
        arguments = {
            "spark_model": _predicting(model),
            "artifact_path": MODEL_NAME,
            # Otherwise MLflow would load the model in another process to infer the requirements.
            "pip_requirements": [f"{p}=={versions[p]}" for p in packages if p in versions],
        }
        active = active_run()
        if active is not None and active.run_id == self._run_id:
            spark.log_model(**arguments)
            return
        with mlflow.start_run(run_id=self._run_id, nested=True):
            spark.log_model(**arguments)

    def _has_all(self, rows: Sequence[HistoryRow]) -> bool:
        """Wait for the thread, for a limited time, and return whether MLflow has these metrics."""
        has_ended = self._feed.close(_SECONDS_AT_END)
        if has_ended and self._has_params and self._logged.issuperset(row[0] for row in rows):
            return True
        logger.warning(
            "MLflow: %s lacks metrics of run %r, which is complete in its store; the model is not "
            "logged there either.",
            redacted(self._within.uri),
            self._name,
        )
        return False

    def _log(self, rows: Sequence[HistoryRow]) -> None:
        """Log the params, unless MLflow has them, and the epochs that it does not have."""
        client = sys.modules["mlflow"].MlflowClient(tracking_uri=self._within.uri)
        entities = importlib.import_module("mlflow.entities")
        if self._run_id is None:
            self._run_id = self._start_run(client)
        if not self._has_params:
            # MLflow rejects a new value for an existing param, such as one that the user logged.
            logged = client.get_run(self._run_id).data.params
            params = {_key(n): _text(v) for n, v in {**self._params, "run_id": self._name}.items()}
            client.log_batch(
                self._run_id,
                params=[entities.Param(n, v) for n, v in params.items() if n not in logged],
            )
            self._has_params = True
        now = int(time.time() * 1000)
        new = {(epoch, f"{s}/{name}"): v for epoch, s, name, v in rows if epoch not in self._logged}
        client.log_batch(
            self._run_id,
            metrics=[entities.Metric(_key(n), v, now, epoch) for (epoch, n), v in new.items()],
        )
        self._logged.update(epoch for epoch, _ in new)

    def _start_run(self, client: Any) -> str:
        """Return the ID of the MLflow run to log to: the active run, or a child run of it."""
        if not self._own_run:
            client.set_tag(self._within.run_id, _RUN_TAG, self._name)
            return self._within.run_id
        tags = {
            "mlflow.parentRunId": self._within.run_id,
            "mlflow.runName": self._name,
            _RUN_TAG: self._name,
        }
        return str(client.create_run(self._within.experiment_id, tags=tags).info.run_id)

    def _end_own_run(self, status: str) -> None:
        try:
            client = sys.modules["mlflow"].MlflowClient(tracking_uri=self._within.uri)
            client.set_terminated(self._run_id, status)
        except Exception as error:
            logger.warning(
                "MLflow: the run of %r could not be ended (%s).", self._name, redacted(str(error))
            )


def _predicting(model: Any) -> PipelineModel:
    """Return a pipeline of the model that adds a ``prediction`` column if needed.

    MLflow's pyfunc returns only that column. The pipeline holds the model alone if it already has
    such a column, or if it has several output columns.
    """
    columns = model.getOutputCols()
    if model.isSet("predictionCol") or len(columns) != 1 or columns[0] == "prediction":
        return PipelineModel([model])
    quoted = columns[0].replace("`", "``")
    statement = f"SELECT *, `{quoted}` AS prediction FROM __THIS__"
    return PipelineModel([model, SQLTransformer(statement=statement)])


def _key(name: str) -> str:
    """Replace characters that MLflow does not allow in names by underscores."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_PARAM else f"{text[: _LONGEST_PARAM - 1]}…"
