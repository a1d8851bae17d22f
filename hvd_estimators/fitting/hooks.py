"""Hooks that a framework's estimator implements and a fit calls. Runs on the driver."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.planning import TrainPlanning
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.fitting.trial import Trial, check_sendable, functions_in
from hvd_estimators.inference.classification import resolve_kind
from hvd_estimators.model import HorovodModel
from hvd_estimators.params.estimator import WritingParams
from hvd_estimators.params.model import (
    ClassificationParams,
    InferenceParams,
    TransformationParams,
)
from hvd_estimators.saving.save import FileReadable, FileWritable
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.spec import TrainSpec
from hvd_estimators.training.value_limits import check_ids, check_labels


class EstimatorHooks(
    TrainPlanning,
    WritingParams,
    InferenceParams,
    ClassificationParams,
    FileWritable,
    FileReadable,
):
    """Params and hooks of all estimators, in the order in which a fit calls the hooks.

    All hooks run on the driver. They share a `Trial`, the result of the dry run, and a `TrainSpec`,
    the ranks' configuration.
    """

    _model_class: ClassVar[type | None] = None
    """Class of the models that functions build; None if ``model`` cannot be such a function."""

    _ranks_log: ClassVar[bool] = False
    """True for Lightning, whose own loggers run on the ranks."""

    _upstream_names: ClassVar[bool] = False
    """True for the names of ``horovod.spark``: "group_0_label" for a metric, and no column
    "prediction"."""

    _state_reader: ClassVar[str] = "hvd_estimators.load_checkpoint(store, which=path)"
    """Expression that reads a trained state, for messages."""

    _sent: ClassVar[tuple[str, ...]] = (
        *("callbacks", "data_module", "gradient_compression"),
        *("transformation_fn", "transformation_batch_fn"),
    )
    """Params that are pickled for the ranks."""

    _sent_functions: ClassVar[tuple[str, ...]] = ()
    """Params whose functions, at least, are pickled for the ranks."""

    def _check_params(self) -> None:
        """Check the params and their combinations, as the first step of a fit.

        Overrides must call this method.

        Raises
        ------
        ParamError
            If a required param is not set, or if params are incompatible.
        """
        self._check_other_names()
        for name in ("model", "feature_cols"):
            value = self.getOrDefault(name)
            if value is None or (isinstance(value, list) and not value):
                raise ParamError(f"{name} is not set. Set {name}.")
        self._input_columns()
        labels = len(self.getOrDefault("label_cols"))
        self._check_run()
        self._check_checkpoints()
        self._check_loss_weights(labels)
        self._check_one_vs_rest()
        # Without labels the number of outputs may not be known yet.
        self._check_classification(len(self.getOrDefault("outputs") or ()) or labels or 1)
        self._check_reading()
        self._transformation()

    def _outputs_are(self, shape: tuple[int | None, ...] | None) -> str | None:
        told = None if self._upstream_names else self._told_by_loss(shape)
        return resolve_kind(super()._outputs_are(shape), told)

    def _told_by_loss(self, shape: tuple[int | None, ...] | None) -> str | None:
        """Return the value of ``outputs_are`` that follows from the loss; None if none does.

        Called with the shape of a row of the only output, or None if it is not known yet.
        """
        return None

    def _with_class_labels(self, numbers: Collection[str]) -> Self:
        """Return this estimator, or a copy that converts labels to what the loss takes.

        ``numbers`` are the columns with one number per row.
        """
        return self

    def _with_objects(self) -> Self:
        """Return this estimator, or a copy that has built the model if that is a function.

        Raises
        ------
        ParamError
            If the function fails or does not return a model, or if ``model_args`` have no function.
        """
        model, arguments = self.getOrDefault("model"), self.getOrDefault("model_args")
        if self._model_class is not None and is_function(model):
            seed = self.getOrDefault("random_seed")
            with contextlib.nullcontext() if seed is None else self._seeded(seed):
                built = build("model", model, self._model_class, **arguments)
            return self.copy({"model": built})
        if arguments:
            raise ParamError(
                f"model_args: found {arguments!r}, but model is a {type(model).__name__} and not a "
                "function. Set a function or class that returns the model."
            )
        return self

    def _seeded(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """Seed the framework's random numbers during the block, and restore their state."""
        return contextlib.nullcontext()

    def _check_sent(self) -> None:
        """Check that the values of the params can be sent to the ranks.

        Overrides must call this method.

        Raises
        ------
        ParamError
            If a value cannot be pickled.
        """
        get = self.getOrDefault
        for name in self._sent:
            if get(name) is not None:
                check_sendable(name, get(name))
        for name in self._sent_functions:
            for function in functions_in(get(name)):
                check_sendable(name, function)

    def _has_own_tensorboard(self) -> bool:
        """Return whether a callback of the user writes losses and metrics for TensorBoard."""
        return False

    def _uses_horovod(self) -> bool:
        """Return whether the ranks of this fit use Horovod."""
        return True

    def _can_dry_run(self) -> bool:
        """Return whether the driver may call the model on rows from the readers."""
        return bool(self.getOrDefault("dry_run"))

    @abc.abstractmethod
    def _dry_run(self, columns: Columns) -> Trial:
        """Run a few rows through copies of the model and the loss.

        If a DataFrame's schema determines all shapes, the dry run comes before the data are
        written. It then uses zeros, or the DataFrame's first rows if zeros fail. Otherwise, it uses
        the first rows of the written or existing dataset.

        Parameters
        ----------
        columns : Columns
            Arrays of a few rows, in the form that the readers pass to the model.

        Returns
        -------
        Trial
            Result for the hooks below, of the framework's own class.

        Raises
        ------
        ShapeError
            If columns, model, loss and labels do not fit each other.
        """

    def _without_dry_run(self, manifest: DatasetManifest) -> Trial:
        """Return a `Trial` without a dry run, if `_can_dry_run` returns False.

        ``manifest`` describes the columns.
        """
        return Trial()

    def _check_trial(self, trial: Trial, manifest: DatasetManifest) -> None:
        """Run the checks that need the trial or the dataset's first rows.

        Overrides must call this method.
        """
        if trial.output_shapes:
            self._class_scores(trial.output_shapes)
        self._check_ranges(trial, manifest)

    def _check_ranges(self, trial: Trial, manifest: DatasetManifest) -> None:
        """Check that labels are classes, and ids are rows of embeddings, where ranges are known."""
        classes = self._class_limits(trial)
        for label, (count, _) in classes.items():
            for number in self.getOrDefault("class_weight") or {}:
                if not 0 <= number < count:
                    raise ParamError(
                        f"class_weight: found a weight of class {number}; the model's {count} "
                        f"outputs for {label!r} are classes 0 to {count - 1}. Leave it out."
                    )
        if self._transformation() is not None:
            return
        for column in manifest.columns:
            if column.range is not None and column.name in classes:
                check_labels(column.name, *column.range, *classes[column.name])
            if column.range is not None and column.name in trial.id_limits:
                check_ids(column.name, *column.range, trial.id_limits[column.name])

    def _class_limits(self, trial: Trial) -> Mapping[str, tuple[int, float | None]]:
        """Return the number of classes, and the ignored number, by label of class numbers."""
        return {}

    def _tensor_dtype(self, name: str, stored: str, trial: Trial) -> str:
        """Return the name of the type in which the model or its loss gets an input or a label.

        Parameters
        ----------
        name : str
            The input, label or sample weights.
        stored : str
            NumPy name of the type that readers deliver.
        trial : Trial
            Result of the dry run.
        """
        return stored

    def _dtype_remedy(self, name: str, dtype: str) -> str:
        """Return a sentence on how to let the model get an input or label in another type."""
        return f"Read {name!r} as {dtype}."

    def _metric_names(self) -> list[str] | None:
        """Return the names of the training metrics, or None if only the ranks know them."""
        return None

    def _monitors(self) -> list[tuple[str, str | None]]:
        """Return pairs of a setting, for messages, and its metric or None for a default one."""
        return [("checkpoint_monitor", self._monitor())]

    def _learning_rates(self, trial: Trial) -> list[float]:
        """Return the initial learning rates of one rank, as far as the driver knows them."""
        rate = self.getOrDefault("learning_rate")
        return [] if rate is None else [rate]

    def _validates_itself(self) -> bool:
        """Return whether the ranks may validate if the dataset has no validation rows."""
        return False

    @abc.abstractmethod
    def _model_identity(self, trial: Trial) -> dict[str, Any]:
        """Return the identity of model and optimizer, without their weights.

        It holds plain values, with other values converted by `named`. Only a fit with an equal
        identity can resume the run.
        """

    def _check_checkpoint(self, path: str, trial: Trial) -> None:
        """Check that the ranks can resume from a checkpoint of an existing run.

        Called before the ranks start, with the file of the newest checkpoint. If that checkpoint is
        damaged, the hook is called with earlier ones. Frameworks whose ranks write checkpoints with
        `hvd_estimators.training.checkpoint_writer.CheckpointWriter` should call `check_state`.

        Raises
        ------
        StoreError
            If the checkpoint is damaged, or has another version.
        """

    def _min_batch_rows(self, trial: Trial) -> int:
        """Return the rows that each training batch of a rank needs, as far as the rows suffice."""
        return 2 if trial.takes_one_row is False else 1

    def _check_spec(self, common: TrainSpec, trial: Trial) -> None:
        """Reject configurations that would fail on the ranks, such as unsupported batch sizes.

        Called with the arguments of `_make_spec`.
        """

    @abc.abstractmethod
    def _make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        """Return the configuration of this framework's ranks.

        Called before the ranks start, with the configuration that is common to all frameworks and
        planned for this number of ranks. Called again if another number of ranks is launched.

        Returns
        -------
        TrainSpec
            A frozen dataclass of plain values and bytes that extends ``common``
            (``MySpec(**vars(common), …)``). It is pickled, and must not import PySpark.
        """

    @abc.abstractmethod
    def _rank_function(self) -> Trainer:
        """Return the function that every rank calls with the spec.

        The function returns a `TrainResult`. It must be importable without PySpark.
        """

    def _rank_environment(self) -> Mapping[str, str | None]:
        """Return environment variables for the ranks; None removes a variable."""
        return {}

    @abc.abstractmethod
    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> HorovodModel:
        """Create the fitted model from the ranks' results, as in ``horovod.spark``.

        Called once, after all ranks have ended. The location of the trained state is added to
        errors that this hook raises. Afterwards, the fit sets the output shapes from the trial or
        from rank 0, unless the model already has output shapes.

        Parameters
        ----------
        run_results : RunResults
            One `TrainResult` per rank. ``run_results.state`` is the state from rank 0, and
            ``run_results.spec`` is the spec from `_make_spec`.
        run_id : str
            Name of the run.
        metadata : mapping
            Dict of each column, by name; see `column_metadata`.
        """

    @abc.abstractmethod
    def get_model_class(self) -> type[HorovodModel]:
        """Return the class of the model that `fit` returns; subclasses can override it."""

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        """Return the params of a fitted model, as in ``horovod.spark``.

        Subclasses can override this method.

        Parameters
        ----------
        **fitted
            ``model``, ``history``, ``run_id``, ``metadata`` and the framework's own params, by
            name.
        """
        metadata = fitted.pop("metadata")
        shared = (InferenceParams, ClassificationParams, TransformationParams)
        names = [name for group in shared for name in group._declarations if self.isSet(name)]
        return {
            "feature_columns": self.getOrDefault("feature_cols"),
            "label_columns": self.getOrDefault("label_cols"),
            "sample_weight_col": self.getOrDefault("sample_weight_col"),
            "_metadata": metadata,
            **{name: self.getOrDefault(name) for name in names},
            **fitted,
        }


def is_function(value: Any) -> bool:
    """Return whether a param's value is a function, method, partial or class."""
    return inspect.isroutine(value) or isinstance(value, (type, functools.partial))


def build(name: str, function: Any, kind: type, *args: Any, **kwargs: Any) -> Any:
    """Return the object that a function of the user builds.

    Parameters
    ----------
    name : str
        The param that holds the function.
    function : callable
        Function, or class.
    kind : type
        Class of the expected object.
    *args, **kwargs
        Arguments of the function.

    Raises
    ------
    ParamError
        If the function fails, or returns anything else.
    """
    try:
        built = function(*args, **kwargs)
    except Exception as error:
        given = f" with {_described(kwargs)}" if kwargs else ""
        raise ParamError(
            f"{name}: {_name(function)} failed{given} ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(built, kind):
        raise ParamError(
            f"{name}: expected a {kind.__module__.split('.')[0]} {kind.__name__}, or a function "
            f"that returns one. {_name(function)} returned {built!r}."
        )
    return built


def _name(function: Any) -> str:
    return f"{getattr(function, '__qualname__', repr(function))}()"


def _described(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
