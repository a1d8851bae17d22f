"""MLflow tracking of a fit: params, metrics during training, and the fitted model.

MLflow's active run belongs to a thread. A fit looks it up in the thread that calls `fit`, and all
threads then log to this run by its ID. Each fit of a grid gets a child run. So does a fit whose
active run already contains another fit. This package uses MLflow only if the program has imported
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.ml import Transformer

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.data.arrays import Columns
from hvd_estimators.fitting.epoch_feed import EpochFeed
from hvd_estimators.saving import mlflow_flavor
from hvd_estimators.store.redaction import redacted
from hvd_estimators.training.spec import HistoryRow

logger = logging.getLogger(__name__)

MODEL_NAME = "hvd_estimators_model"
"""Name of the logged model. Users give other names to the models that they log themselves."""

_RUN_TAG = "hvd_estimators.run_id"
_SECONDS_AT_END = 60.0
_LONGEST_PARAM = 500
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
        The params to log.
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
        examples: Callable[[], Columns | None],
    ) -> None:
        """Log the fitted model, unless it belongs to a grid, and close.

        Parameters
        ----------
        rows : sequence of HistoryRow
            The whole history. Epochs that are not logged yet are logged from it.
        model : Transformer
            The fitted model.
        examples : callable
            Returns training rows for signature and input example.
        """
        self._feed.put(rows)
        if not self._has_all(rows):
            return
        if not self._is_grid:
            try:
                self._log_model(model, examples, max((row[0] for row in rows), default=0))
            except Exception as error:
                logger.warning(
                    "MLflow: the model was not logged (%s: %s). The fit is complete; "
                    "model.save(path) saves the model.%s",
                    type(error).__name__,
                    redacted(str(error)),
                    f" Run: {INSTALL['mlflow']}" if isinstance(error, ImportError) else "",
                )
        if self._own_run:
            self._end_own_run("FINISHED")

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
                # MLflow shows this epoch's metrics with the model. Its default is the first epoch.
                log_model(artifact_path=None, name=MODEL_NAME, step=epoch, **options)
            else:  # MLflow 2
                log_model(artifact_path=MODEL_NAME, **options)

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
        new = [row for row in rows if row[0] not in self._logged]
        metrics = {(e, _key(n)): v for e, s, name, v in new for n in _metric_names(s, name)}
        client.log_batch(
            self._run_id,
            metrics=[entities.Metric(name, v, now, epoch) for (epoch, name), v in metrics.items()],
        )
        self._logged.update(row[0] for row in new)

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


def _metric_names(stage: str, name: str) -> Iterator[str]:
    """Yield the names of a metric: Keras's, and one with the stage as a folder."""
    yield f"{stage}/{name}"
    yield name if stage == "train" or name.startswith("val_") else f"val_{name}"


def _key(name: str) -> str:
    """Replace characters that MLflow does not allow in names by underscores."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_PARAM else f"{text[: _LONGEST_PARAM - 1]}…"
