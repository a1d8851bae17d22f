"""Interface between a fit and a framework: torch, Lightning, Keras or another one.

Runs on the driver.
"""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from hvd_estimators._util.random_state import seeded
from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import HvdEstimatorsError, ParamError
from hvd_estimators.fitting.run import GridFit, RunResults
from hvd_estimators.fitting.settings import Settings
from hvd_estimators.fitting.trial import Trial, check_sendable, functions_in
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import DeclaredParams
from hvd_estimators.params.model import COLLATE_PARAMS
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.collectives_choice import choose_collectives
from hvd_estimators.training.spec import TrainSpec


class Framework(abc.ABC):
    """The framework's part of one fit, in the order in which `Fit` calls its methods.

    Parameters
    ----------
    settings : Settings
        The params of this fit, an object of ``settings_class``.
    """

    settings_class: ClassVar[type[Settings]] = Settings

    train: Trainer
    """The function that every rank calls with the spec.

    It returns a `TrainResult`, and must be importable without PySpark.
    """

    name: ClassVar[str]
    """Prefix of the names of new runs, and the framework that writes their checkpoints."""

    model_class: ClassVar[type | None] = None
    """Class of the models that functions build; None if ``model`` cannot be such a function."""

    tensor_library: ClassVar[str | None] = None
    """The library whose tensors the ranks reduce, for ``collectives``; None: only with Horovod."""

    ranks_log: ClassVar[bool] = False
    """True for Lightning, whose own loggers run on the ranks."""

    sent: ClassVar[tuple[str, ...]] = (
        *("callbacks", "data_module", "gradient_compression"),
        *("transformation_fn", "transformation_batch_fn", "collate_fn"),
    )
    """Params that are pickled for the ranks."""

    sent_functions: ClassVar[tuple[str, ...]] = ()
    """Params whose functions, at least, are pickled for the ranks."""

    run_settings: ClassVar[tuple[str, ...]] = (
        *("feature_cols", "label_cols", "label_shapes", "sample_weight_col"),
        *("learning_rate", "scale_learning_rate", "loss_weights", "gradient_compression"),
        *("batch_size", "train_steps_per_epoch", "backward_passes_per_step"),
        *("random_seed", "shuffle", "transformation_fn", "transformation_batch_fn"),
        *("transformation_edit_fields", "transformation_removed_fields"),
    )
    """Params that a run records; a fit with other values cannot resume it."""

    optional_run_settings: ClassVar[tuple[str, ...]] = ("outputs", *COLLATE_PARAMS)
    """Params that a run records only if they differ from the default."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def with_objects(cls, estimator: Fittable) -> Fittable:
        """Return the estimator, or a copy that has built the model if that is a function.

        Raises
        ------
        ParamError
            If the function fails or does not return a model, or if ``model_args`` have no function.
        """
        model, arguments = map(estimator.getOrDefault, ("model", "model_args"))
        if cls.model_class is not None and is_function(model):
            seed = estimator.getOrDefault("random_seed")
            with seeded(seed):
                built = build("model", model, cls.model_class, **arguments)
            return estimator.copy({"model": built})
        if arguments:
            raise ParamError(
                f"model_args: found {arguments!r}, but model is a {type(model).__name__} and not a "
                "function. Set a function or class that returns the model."
            )
        return estimator

    @classmethod
    def with_label_types(cls, estimator: Fittable, numbers: Collection[str]) -> Fittable:
        """Return the estimator, or a copy that converts labels to what the loss takes.

        ``numbers`` are the columns with one number per row.
        """
        return estimator

    def check(self) -> None:
        """Check the framework's params, before anything is read or written.

        Overrides must call this method, which checks that values can be sent to the ranks.

        Raises
        ------
        ParamError
            If a required param is not set, if params are incompatible, or if a value cannot be
            pickled.
        """
        for name in self.sent:
            if (value := self.settings.values[name]) is not None:
                check_sendable(name, value)
        for name in self.sent_functions:
            for function in functions_in(self.settings.values[name]):
                check_sendable(name, function)

    @property
    def collectives(self) -> str:
        """The library that reduces values over the ranks: ``"horovod"`` or ``"torch"``."""
        if self.tensor_library is None:
            return "horovod"
        return choose_collectives(self.settings.collectives, self.tensor_library)[0]

    @abc.abstractmethod
    def dry_run(self, columns: Columns) -> Trial:
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
            Result for the methods below, of the framework's own class.

        Raises
        ------
        ShapeError
            If columns, model, loss and labels do not fit each other.
        """

    def without_dry_run(self, first_rows: Callable[[], Columns]) -> Trial:
        """Return a `Trial` without a dry run, as ``dry_run=False`` demands.

        ``first_rows()`` reads the dataset's first rows.
        """
        return Trial()

    def check_trial(self, trial: Trial, manifest: DatasetManifest) -> None:  # noqa: B027
        """Run the framework's checks that need the trial or the dataset."""

    def tensor_dtype(
        self, name: str, stored: str, trial: Trial
    ) -> tuple[str, Callable[[str], str]]:
        """Return the type in which the model or its loss gets an input or a label.

        Parameters
        ----------
        name : str
            The input, label or sample weights.
        stored : str
            NumPy name of the type that readers deliver.
        trial : Trial
            Result of the dry run.

        Returns
        -------
        dtype : str
            NumPy name of the type.
        remedy : callable
            Returns a sentence on how to let the model get another type.
        """
        return stored, lambda dtype: f"Read {name!r} as {dtype}."

    def learning_rates(self, trial: Trial) -> list[float]:
        """Return the initial learning rates of one rank, as far as the driver knows them."""
        rate = self.settings.learning_rate
        return [] if rate is None else [rate]

    @abc.abstractmethod
    def model_identity(self, trial: Trial) -> dict[str, Any]:
        """Return the identity of model and optimizer, without their weights.

        It holds plain values, with other values converted by `named`. Only a fit with an equal
        identity can resume the run.
        """

    def min_batch_rows(self, trial: Trial) -> int:
        """Return the rows that each training batch of a rank needs, as far as the rows suffice."""
        return 2 if trial.takes_one_row is False else 1

    @abc.abstractmethod
    def make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        """Return the configuration of this framework's ranks.

        Called before the ranks start, with the configuration that is common to all frameworks and
        planned for this number of ranks. Called again if another number of ranks is launched.

        Returns
        -------
        TrainSpec
            A frozen dataclass of plain values and bytes that extends ``common``
            (``MySpec(**vars(common), …)``). It is pickled, and must not import PySpark.

        Raises
        ------
        ParamError
            If the ranks would fail with this configuration, such as an unsupported batch size.
        """


class Fittable(DeclaredParams):
    """Params of an estimator, and what a fit needs of it besides them."""

    framework_class: ClassVar[type[Framework]]
    """The framework's part of a fit."""

    upstream_names: ClassVar[bool] = False
    """True for the names of ``horovod.spark``, see `Settings`."""

    grid_fit: GridFit | None = None
    """The place of the fit in a grid."""

    @abc.abstractmethod
    def _get_or_create_backend(self) -> Any:
        """Return the backend that runs the ranks, as in ``horovod.spark``."""

    @abc.abstractmethod
    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> HorovodModel:
        """Create the fitted model from the ranks' results, as in ``horovod.spark``.

        Called once, after all ranks have ended. The location of the trained state is added to
        errors that this method raises. Afterwards, the fit sets the output shapes from the trial or
        from rank 0, unless the model already has output shapes.

        Parameters
        ----------
        run_results : RunResults
            One `TrainResult` per rank. ``run_results.state`` is the state from rank 0, and
            ``run_results.spec`` is the spec from `Framework.make_spec`.
        run_id : str
            Name of the run.
        metadata : mapping
            Dict of each column, by name; see `column_metadata`.
        """


WEIGHT_REMEDY = "Divide the weights by a constant, or cast them to float or double."
"""Sentence on sample weights that the model's type does not hold."""


def is_function(value: Any) -> bool:
    """Return whether a param's value is a function, method, partial or class."""
    return inspect.isroutine(value) or isinstance(value, (type, functools.partial))


def build(name: str, function: Any, kind: type, /, *args: Any, **kwargs: Any) -> Any:
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
    except HvdEstimatorsError:
        raise
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
