"""What a framework's estimator fills in: the hooks that the recipe of a fit calls."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.planning import TrainPlanning
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.fitting.trial import Trial, check_sendable, functions_in
from hvd_estimators.model import HorovodModel
from hvd_estimators.params.estimator import WritingParams
from hvd_estimators.params.grids import GridParams
from hvd_estimators.params.model import ClassificationParams, InferenceParams
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.spec import TrainSpec

__all__ = ["EstimatorHooks"]


class EstimatorHooks(
    TrainPlanning, WritingParams, InferenceParams, ClassificationParams, GridParams
):
    """The params of all estimators, and the hooks in the order in which the recipe calls them.

    All of them run on the driver. What they share is a `Trial`, which says what the dry run found
    out, and a `TrainSpec`, which says what the ranks are told.
    """

    _state_reader: ClassVar[str] = "hvd_estimators.load_checkpoint(store, which=path)"
    """What opens a trained state, for messages."""

    _sent: ClassVar[tuple[str, ...]] = (
        *("callbacks", "data_module", "gradient_compression"),
        *("transformation_fn", "transformation_batch_fn"),
    )
    """Params that are pickled for the ranks."""

    _sent_functions: ClassVar[tuple[str, ...]] = ()
    """Params of which at least the functions are pickled for the ranks."""

    def _check_params(self) -> None:
        """Check the params together, before anything else is done; extends ours.

        Raises
        ------
        ParamError
            If they do not go together.
        """
        self._check_other_names()
        for name in ("store", "model", "feature_cols"):
            value = self.getOrDefault(name)
            if value is None or (isinstance(value, list) and not value):
                raise ParamError(f"{name} is not set. Set {name}.")
        if self.getOrDefault("label_cols") is None:
            raise ParamError(
                "label_cols is not set. Set label_cols, or [] to train without labels."
            )
        labels = len(self.getOrDefault("label_cols"))
        self._check_run()
        self._check_checkpoints()
        self._check_loss_weights(labels)
        self._check_one_vs_rest()
        # Without labels the number of outputs may not be known yet.
        self._check_classification(len(self.getOrDefault("outputs") or ()) or labels or 1)
        self._check_reading()
        self._transformation()

    def _check_sent(self) -> None:
        """Make sure that what the params hold can be sent to the ranks; extends ours.

        Raises
        ------
        ParamError
            If something cannot.
        """
        get = self.getOrDefault
        for name in self._sent:
            if get(name) is not None:
                check_sendable(name, get(name))
        for name in self._sent_functions:
            for function in functions_in(get(name)):
                check_sendable(name, function)

    def _can_dry_run(self) -> bool:
        """Return whether a model may be called on the driver, on rows that the readers give."""
        return bool(self.getOrDefault("dry_run"))

    @abc.abstractmethod
    def _dry_run(self, columns: Columns) -> Trial:
        """Run a few rows through copies of model and loss.

        Where a DataFrame's schema tells all shapes this is called before anything is written: on
        zeros, and on the first rows where zeros will not do. Else it is called on the first rows of
        the dataset that is written, or given.

        Parameters
        ----------
        columns : Columns
            Arrays of a few rows, as the readers give them to the model.

        Returns
        -------
        Trial
            What was found out, for the hooks below; the framework's own kind.

        Raises
        ------
        ShapeError
            If columns, model, loss and labels do not fit each other.
        """

    def _without_dry_run(self, manifest: DatasetManifest) -> Trial:
        """Return what is known where `_can_dry_run` says no; ``manifest`` tells the columns."""
        return Trial()

    def _check_trial(self, trial: Trial, manifest: DatasetManifest) -> None:
        """Check what only the trial tells, or the dataset's first rows; extends ours."""
        if trial.output_shapes:
            self._class_scores(trial.output_shapes)

    def _metric_names(self) -> list[str] | None:
        """Return the names of what is measured in training; None where only the ranks know."""
        return None

    def _validates_itself(self) -> bool:
        """Return whether the ranks may validate where the dataset has no rows for it."""
        return False

    @abc.abstractmethod
    def _model_identity(self, trial: Trial) -> dict[str, Any]:
        """Return what tells model and optimizer from others, but for their weights.

        Plain values, or what `named` makes of others: a run is gone on with only by a fit that
        finds the same.
        """

    def _check_checkpoint(self, path: str, trial: Trial) -> None:
        """Make sure that the ranks can go on from a checkpoint of a run that is there already.

        Called before anything starts, with the newest checkpoint's file, and with those before
        where that one is damaged. A framework whose ranks write it with
        `hvd_estimators.training.checkpoint_writer.CheckpointWriter` calls `check_state`.

        Raises
        ------
        StoreError
            If it is damaged, or not of this version.
        """

    def _check_spec(self, common: TrainSpec, trial: Trial) -> None:
        """Refuse what the ranks would fail at: batches that a model cannot take, for example.

        Called with what `_make_spec` is called with.
        """

    @abc.abstractmethod
    def _make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        """Return what this framework's ranks are told.

        Called when ranks are about to start, with what is common to all frameworks, planned for as
        many ranks; called again if others start in their place.

        Returns
        -------
        TrainSpec
            A frozen dataclass of plain values and bytes that extends ``common``
            (``MySpec(**vars(common), …)``); it is pickled, and must not import PySpark.
        """

    @abc.abstractmethod
    def _rank_function(self) -> Trainer:
        """Return the function that every rank calls with the spec, and that returns a TrainResult.

        It is importable where there is no PySpark.
        """

    def _rank_environment(self) -> Mapping[str, str | None]:
        """Return environment variables of the ranks; None deletes one."""
        return {}

    @abc.abstractmethod
    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> HorovodModel:
        """Make the fitted model of what the ranks returned. As in ``horovod.spark``.

        Called once, when all ranks have ended. What it raises tells where the trained state is
        kept. The output shapes that the trial told are set afterwards, unless the model has some.

        Parameters
        ----------
        run_results : RunResults
            A `TrainResult` per rank; ``run_results.state`` is what rank 0 trained, and
            ``run_results.spec`` what `_make_spec` returned.
        run_id : str
            Name of the run.
        metadata : mapping
            Column to a dict, see `column_metadata`.
        """

    @abc.abstractmethod
    def get_model_class(self) -> type[HorovodModel]:
        """Return the class of the model that `fit` returns; for subclasses to override."""

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        """Return the params of a fitted model; for subclasses to override. As in ``horovod.spark``.

        Parameters
        ----------
        **fitted
            ``model``, ``history``, ``run_id``, ``metadata`` and what the framework adds, by name.
        """
        metadata = fitted.pop("metadata")
        return {
            "feature_columns": self.getOrDefault("feature_cols"),
            "label_columns": self.getOrDefault("label_cols"),
            "_metadata": metadata,
            **self._inference_params(),
            **self._classification(),
            **self._transformation_params(),
            **fitted,
        }
