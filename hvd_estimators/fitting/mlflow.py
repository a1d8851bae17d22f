"""A fit as MLflow shows it: its params, what is measured while it trains, and the fitted model.

MLflow's active run is one of a thread. It is asked for where `fit` is called, and everything goes
to that run by its name, from whichever thread. Fits of a grid have runs of their own below it, and
so has a fit in a run that another fit has written to. Runs on the driver; MLflow is never imported
by a program that has not done so itself.
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
from hvd_estimators.store.storage_errors import redacted
from hvd_estimators.training.spec import HistoryRow

__all__ = ["Tracking", "TrackingRun", "active_run"]

logger = logging.getLogger(__name__)

MODEL_NAME = "model"
"""Where the model lies among a run's artifacts."""

_RUN_TAG = "hvd_estimators.run_id"
_SECONDS_AT_END = 60.0
_BATCH = 100
_LONGEST_PARAM = 500
_PACKAGES = {
    "keras": ("keras", "tensorflow"),
    "lightning": ("torch", "lightning", "pytorch-lightning"),
    "torch": ("torch",),
}

_lock = threading.Lock()
_written: dict[tuple[str, str], tuple[str, set[int]]] = {}
"""Which run of this package each of MLflow's active runs is of, and the epochs that it has."""


@dataclass(frozen=True)
class TrackingRun:
    """A run of MLflow's.

    Attributes
    ----------
    uri : str
        The tracking server, folder or database.
    run_id : str
        Its ID.
    experiment_id : str
        The experiment that it is in.
    """

    uri: str
    run_id: str
    experiment_id: str


def active_run() -> TrackingRun | None:
    """Return MLflow's active run of this thread; None without one, or without MLflow."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is None:
        return None
    try:
        active = mlflow.active_run()
        if active is None:
            return None
        return TrackingRun(mlflow.get_tracking_uri(), active.info.run_id, active.info.experiment_id)
    except Exception as error:
        logger.warning("MLflow: its active run cannot be told (%s).", redacted(str(error)))
        return None


class Tracking:
    """Logs one fit.

    Nothing that MLflow raises, and no server that does not answer, ends or holds up the fit.

    Parameters
    ----------
    within : TrackingRun
        The active run.
    name : str
        The ``run_id`` of this fit.
    params : mapping
        What is noted of the estimator's params.
    own_run : bool
        Whether the fit has a run of its own, below the active one.
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
        self._told: set[int] = set() if self._own_run else written[1]
        self._run_id: str | None = None
        self._logged_params = False
        self._feed = EpochFeed(self._take, f"MLflow ({redacted(within.uri)})")

    def start(self) -> None:
        """Log the params, by another thread."""
        self._feed.start()

    def put(self, rows: Sequence[HistoryRow]) -> None:
        """Log the rows of an epoch, by another thread."""
        self._told.update(row[0] for row in rows)
        self._feed.put(rows)

    def fail(self) -> None:
        """Log what was measured until now, and end."""
        if self._has_all() and self._own_run:
            self._end_own_run("FAILED")

    def complete(
        self,
        rows: Sequence[HistoryRow],
        model: Transformer,
        framework: str,
        versions: Mapping[str, str],
    ) -> None:
        """Log the fitted model as one of Spark's, unless it is one of a grid, and end.

        Parameters
        ----------
        rows : sequence of HistoryRow
            The whole history; epochs that no rank has told while it trained are logged from it.
        model : Transformer
            The model.
        framework : str
            Its framework.
        versions : mapping
            Of packages.
        """
        self.put([row for row in rows if row[0] not in self._told])
        if not self._has_all():
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
            # Otherwise it would load the model in another process to find out.
            "pip_requirements": [f"{p}=={versions[p]}" for p in packages if p in versions],
        }
        active = active_run()
        if active is not None and active.run_id == self._run_id:
            spark.log_model(**arguments)
            return
        with mlflow.start_run(run_id=self._run_id, nested=True):
            spark.log_model(**arguments)

    def _has_all(self) -> bool:
        """Return whether MLflow has everything, which takes a while at most."""
        if self._feed.close(_SECONDS_AT_END):
            return True
        logger.warning(
            "MLflow: %s has not taken all that was measured in run %r, which is complete in its "
            "store; the model is not logged there either.",
            redacted(self._within.uri),
            self._name,
        )
        return False

    def _take(self, rows: Sequence[HistoryRow]) -> None:
        mlflow = sys.modules["mlflow"]
        client = mlflow.MlflowClient(tracking_uri=self._within.uri)
        if self._run_id is None:
            self._run_id = self._begin(client)
        if not self._logged_params:
            self._log_params(client, self._run_id)
            self._logged_params = True
        moment = int(time.time() * 1000)
        metric = importlib.import_module("mlflow.entities").Metric
        metrics = [metric(_key(f"{s}/{name}"), value, moment, e) for e, s, name, value in rows]
        for start in range(0, len(metrics), _BATCH):
            client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH])

    def _begin(self, client: Any) -> str:
        if not self._own_run:
            client.set_tag(self._within.run_id, _RUN_TAG, self._name)
            return self._within.run_id
        tags = {
            "mlflow.parentRunId": self._within.run_id,
            "mlflow.runName": self._name,
            _RUN_TAG: self._name,
        }
        return str(client.create_run(self._within.experiment_id, tags=tags).info.run_id)

    def _log_params(self, client: Any, run_id: str) -> None:
        # MLflow refuses another value of a param that is there, such as one of the user's.
        known = client.get_run(run_id).data.params
        param = importlib.import_module("mlflow.entities").Param
        params = [
            param(_key(name), _text(value))
            for name, value in {**self._params, "run_id": self._name}.items()
            if _key(name) not in known
        ]
        for start in range(0, len(params), _BATCH):
            client.log_batch(run_id, params=params[start : start + _BATCH])

    def _end_own_run(self, status: str) -> None:
        try:
            client = sys.modules["mlflow"].MlflowClient(tracking_uri=self._within.uri)
            client.set_terminated(self._run_id, status)
        except Exception as error:
            logger.warning(
                "MLflow: the run of %r could not be ended (%s).", self._name, redacted(str(error))
            )


def _predicting(model: Any) -> PipelineModel:
    """Return a model with the column ``prediction``, which alone is what MLflow's pyfunc returns.

    As it is, where it has one, or several labels.
    """
    columns = model.getOutputCols()
    if model.isSet("predictionCol") or len(columns) != 1 or columns[0] == "prediction":
        return PipelineModel([model])
    quoted = columns[0].replace("`", "``")
    statement = f"SELECT *, `{quoted}` AS prediction FROM __THIS__"
    return PipelineModel([model, SQLTransformer(statement=statement)])


def _key(name: str) -> str:
    """Return a name with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_PARAM else f"{text[: _LONGEST_PARAM - 1]}…"
