"""Logger to MLflow: params, metrics during training, and the fitted model.

MLflow's active run belongs to a thread. A fit looks it up in the thread that calls `fit`, and all
threads then log to this run by its ID. This package uses MLflow only if the program has imported
it. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.ml import Transformer

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.data.arrays import Columns
from hvd_estimators.loggers import LoggedRun, Logger
from hvd_estimators.saving import mlflow_flavor
from hvd_estimators.store.redaction import redacted

logger = logging.getLogger(__name__)

MODEL_NAME = "hvd_estimators_model"
"""Name of the logged model. Users give other names to the models that they log themselves."""

_RUN_TAG = "hvd_estimators.run_id"
_LONGEST_PARAM = 500
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_lock = threading.Lock()
_first_fits: dict[tuple[str, str], str] = {}
"""For each active MLflow run (URI and ID), the run ID of the first fit in it."""


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


class MlflowLogger(Logger):
    """Logger of one fit to MLflow.

    Parameters
    ----------
    within : TrackingRun
        The active run.
    params : mapping
        The params to log.
    own_run : bool
        Whether the fit is part of a grid and gets a child run of the active run. A second fit in
        the active run gets one, too.
    """

    def __init__(self, within: TrackingRun, params: Mapping[str, Any], own_run: bool) -> None:
        self._within = within
        self._params = params
        self._is_grid = self._own_run = own_run
        self._run_id: str | None = None

    def start(self, run: LoggedRun) -> None:
        """Create the child run, if the fit gets one, and log the params that MLflow lacks."""
        if not self._own_run:
            with _lock:
                first = _first_fits.setdefault((self._within.uri, self._within.run_id), run.run_id)
            self._own_run = first != run.run_id
        client = self._client()
        if self._own_run:
            tags = {"mlflow.parentRunId": self._within.run_id, "mlflow.runName": run.run_id}
            created = client.create_run(self._within.experiment_id, tags=tags)
            self._run_id = str(created.info.run_id)
        else:
            self._run_id = self._within.run_id
        client.set_tag(self._run_id, _RUN_TAG, run.run_id)
        # MLflow rejects a new value for an existing param, such as one that the user logged.
        logged = client.get_run(self._run_id).data.params
        params = {_key(n): _text(v) for n, v in {**self._params, "run_id": run.run_id}.items()}
        param = importlib.import_module("mlflow.entities").Param
        client.log_batch(
            self._run_id, params=[param(n, v) for n, v in params.items() if n not in logged]
        )

    def log_metrics(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Log the metrics, with the epoch as their step."""
        metric = importlib.import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        self._client().log_batch(
            self._run_id, metrics=[metric(_key(n), v, now, epoch) for n, v in metrics.items()]
        )

    def finish(self, status: str) -> None:
        """End the child run, if the fit has one."""
        if self._own_run and self._run_id is not None:
            self._client().set_terminated(self._run_id, _STATUS[status])

    def log_model(
        self, model: Transformer, examples: Callable[[], Columns | None], epoch: int
    ) -> None:
        """Log the fitted model, unless it belongs to a grid; a failure is a warning.

        Parameters
        ----------
        model : Transformer
            The fitted model.
        examples : callable
            Returns training rows for signature and input example.
        epoch : int
            MLflow shows the metrics of this epoch with the model.
        """
        if self._is_grid:
            return
        try:
            self._log_model(model, examples, epoch)
        except Exception as error:
            logger.warning(
                "MLflow: the model was not logged (%s: %s). The fit is complete; "
                "model.save(path) saves the model.%s",
                type(error).__name__,
                redacted(str(error)),
                f" Run: {INSTALL['mlflow']}" if isinstance(error, ImportError) else "",
            )

    def _log_model(
        self, model: Transformer, examples: Callable[[], Columns | None], epoch: int
    ) -> None:
        mlflow = sys.modules["mlflow"]
        with contextlib.ExitStack() as stack:
            active = active_run()
            if active is None or active.run_id != self._run_id:
                stack.enter_context(mlflow.start_run(run_id=self._run_id, nested=True))
            if not mlflow_flavor.has_predictor(model):
                mlflow_flavor.log_spark_model(model, MODEL_NAME)
                return
            log_model = importlib.import_module("mlflow.models").Model.log
            options = {"flavor": mlflow_flavor, "model": model, "rows": examples}
            if "name" in inspect.signature(log_model).parameters:
                # MLflow's default is the first epoch.
                log_model(artifact_path=None, name=MODEL_NAME, step=epoch, **options)
            else:  # MLflow 2
                log_model(artifact_path=MODEL_NAME, **options)

    def _client(self) -> Any:
        return sys.modules["mlflow"].MlflowClient(tracking_uri=self._within.uri)


def _key(name: str) -> str:
    """Replace characters that MLflow does not allow in names by underscores."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_PARAM else f"{text[: _LONGEST_PARAM - 1]}…"
