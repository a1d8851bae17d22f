"""`LightningEstimator`: trains a LightningModule on a DataFrame."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from pyspark.sql import DataFrame

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.backend import Backend
from hvd_estimators.lightning.adapter import ModuleAdapter
from hvd_estimators.lightning.checks import adapted_trainer_args, check_step, row_shapes
from hvd_estimators.lightning.flavor import Flavor, is_lightning, of_flavor, one_flavor
from hvd_estimators.lightning.loaders import with_dtypes
from hvd_estimators.lightning.model import LightningModel, forward_inputs
from hvd_estimators.lightning.trainer import LightningTrainSpec, train
from hvd_estimators.lightning.users_data import is_lightning_data
from hvd_estimators.loading.transformation import Transformation
from hvd_estimators.params import boolean, declare, integer
from hvd_estimators.parquet.columns import Columns
from hvd_estimators.parquet.manifest import DatasetManifest
from hvd_estimators.prepare.properties import column_metadata
from hvd_estimators.runs import named
from hvd_estimators.spec import TrainResult
from hvd_estimators.torch import estimator as torch_estimator
from hvd_estimators.torch.serialization import (
    dump_module,
    load_module,
    load_state,
)

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["LightningEstimator", "TorchEstimator"]

logger = logging.getLogger(__name__)

_OF_A_PART = frozenset(
    {
        *("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "callbacks", "logger"),
        *("profiler", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar"),
        *("enable_model_summary", "default_root_dir", "num_sanity_val_steps"),
    }
)
"""Arguments of a Trainer that may be others in a later part of a run."""

_PROFILERS = ("simple", "advanced", "pytorch")


def _profiler(name: str, value: Any) -> Any:
    if isinstance(value, str) and value not in _PROFILERS:
        raise ParamError(
            f"{name}: expected a Profiler or one of {', '.join(map(repr, _PROFILERS))}, found "
            f"{value!r}."
        )
    return value


def _arguments(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name}: expected a dict of Trainer arguments, found {value!r}.")
    return dict(value)


class LightningEstimator(torch_estimator.TorchEstimator):
    """Trains a LightningModule on a DataFrame, with Horovod, one process per rank.

    ``fit(df)`` writes the needed columns as Parquet to the store, trains on ``num_proc`` Spark
    tasks with Lightning's Trainer, and returns a `LightningModel`. ``training_step`` and
    ``validation_step`` get a batch as a dict of column name to tensor, rows first, in the dtypes
    in which columns are stored (``column_dtypes`` asks for others). A plain ``torch.nn.Module``
    with ``optimizer`` and ``loss`` trains as with `TorchEstimator`, under Lightning's callbacks
    and loggers. Runs on the driver. A module that reads ``sample_weight_col`` returns
    ``(weight * loss).mean()``, which is what the others do with it.

    An epoch trains on every row once. Optimizers step with their learning rates multiplied by the
    number of ranks. In automatic and in manual optimization the gradient of a step is that of the
    mean over the rows of all ranks; a rank that has no rows in a step (there are fewer than steps)
    goes along with two rows of its batch before, which count for nothing. What is logged for an
    epoch is reduced over the ranks by rows, ``sync_dist`` or not, so that callbacks see the same
    values on every rank. Lightning's ``ModelCheckpoint`` with a ``monitor`` makes `fit` return the
    best weights instead of the last; its files go to the run's directory in the store.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError
        Before training, if params, columns, shapes, rows, store or cluster will not do.
    WorkerFailedError
        If a rank fails.
    """

    callbacks = declare("Lightning callbacks.", default=[])
    num_gpus = declare(
        "GPUs of a rank: 0 or 1. Default: 1 where there are any.",
        convert=integer(0),
        accessor="NumGPUs",
    )
    logger = declare(
        "Lightning logger, or a list of them; they write to the run's logs. Default: TensorBoard, "
        "or CSV files where it is not installed. False: none. MLflow's does so if it writes to a "
        "folder, and the store is local; other MLflow servers and databases stay as they are."
    )
    log_every_n_steps = declare(
        "Steps between two entries of the loggers.", default=50, convert=integer(1)
    )
    terminate_on_nan = declare(
        "Fail when a loss or a parameter is NaN or infinite.",
        default=False,
        convert=boolean,
        accessor="TerminateOnNan",
    )
    profiler = declare(
        "Lightning profiler, or 'simple', 'advanced' or 'pytorch'; it writes to the run's logs.",
        convert=_profiler,
    )
    trainer_args = declare(
        "Further arguments of Lightning's Trainer, which replace those that the estimator gives.",
        default={},
        convert=_arguments,
    )
    data_module = declare(
        "What reads the rows: 'petastorm', 'arrow', a class derived from "
        "hvd_estimators.loading.readers.DataModule, or a LightningDataModule class. Default: "
        "Petastorm where it can be imported, PyArrow otherwise."
    )
    loader_num_epochs = declare(
        "Passes of a LightningDataModule's reader; it gets this as num_reader_epochs. Default: "
        "without end, as the built-in readers always read.",
        convert=integer(1),
    )
    debug_data_loader = declare("Passed to a LightningDataModule.", default=False, convert=boolean)
    train_async_data_loader_queue_size = declare(
        "Passed to a LightningDataModule. The built-in readers read ahead by a bounded number of "
        "bytes."
    )
    val_async_data_loader_queue_size = declare(
        "Passed to a LightningDataModule, see train_async_data_loader_queue_size."
    )

    def get_model_class(self) -> type[LightningModel]:
        """Return the class of the model that `fit` returns; for subclasses to override."""
        return LightningModel

    def _model_identity(self) -> dict[str, Any]:
        identity = super()._model_identity()
        module, get = self.getOrDefault("model"), self.getOrDefault
        arguments = {k: v for k, v in get("trainer_args").items() if k not in _OF_A_PART}
        identity["trainer_args"] = named(arguments)
        if self._is_lightning:
            identity["hparams"] = named(dict(module.hparams))
            if get("learning_rate") is None:
                # Where Lightning's tuner puts it.
                rates = {name: getattr(module, name, None) for name in ("learning_rate", "lr")}
                identity["rates"] = named(rates)
        return identity

    @property
    def _is_lightning(self) -> bool:
        return is_lightning(self.getOrDefault("model"), "LightningModule")

    def _check_params(self) -> None:
        get = self.getOrDefault
        super()._check_params()
        for callback in get("callbacks"):
            if not is_lightning(callback, "Callback"):
                raise ParamError(
                    f"callbacks: expected instances of Lightning's Callback, found {callback!r}."
                )
        if (get("num_gpus") or 0) > 1:
            raise ParamError(
                f"num_gpus: a rank trains on one GPU, found {get('num_gpus')}. Set num_proc to the "
                "number of GPUs."
            )
        adapted_trainer_args(get("trainer_args"), self._flavor())

    def _flavor(self) -> Flavor:
        """Return the package of Lightning's that the user's objects belong to."""
        return one_flavor(self._lightning_objects())

    def _lightning_objects(self) -> Iterator[tuple[str, Any]]:
        get = self.getOrDefault
        for name in ("model", "data_module", "callbacks", "logger", "profiler"):
            for given in _as_list(get(name)):
                yield name, given
        for name, value in get("trainer_args").items():
            for given in _as_list(value):
                yield f"trainer_args: {name}", given

    def _check_reading(self) -> None:
        if not is_lightning_data(self.getOrDefault("data_module")):
            super()._check_reading()

    def _check_training(self) -> None:
        """Check model, optimizer and loss together."""
        if not self._is_lightning:
            super()._check_training()
            return
        get = self.getOrDefault
        for name in (
            "optimizer",
            "loss",
            "loss_weights",
            "loss_constructors",
            "metrics",
            "train_minibatch_fn",
        ):
            if get(name) is not None and get(name) != []:
                raise ParamError(
                    f"{name}: a LightningModule brings its own. Leave {name} out, or give a plain "
                    "torch.nn.Module."
                )
        if get("backward_passes_per_step") > 1 and not get("model").automatic_optimization:
            raise ParamError(
                "backward_passes_per_step: the module optimizes manually and accumulates gradients "
                "itself. Leave it out."
            )

    def _transformation(self) -> Transformation | None:
        transformation = super()._transformation()
        if transformation is None or not self._is_lightning:
            return transformation
        # What a LightningModule takes from a batch is its own affair.
        return replace(transformation, all_needed=False)

    def _check_frame(self, dataset: DataFrame) -> Any:
        # A data module of the user's decides what batches look like.
        if is_lightning_data(self.getOrDefault("data_module")):
            return None
        return super()._check_frame(dataset)

    def _train(
        self, manifest: DatasetManifest, backend: Backend, trial: Any = None
    ) -> LightningModel:
        get = self.getOrDefault
        data = self._data_spec(manifest, backend.num_processes())
        output_shapes: list[tuple[int, ...]] = []
        if not is_lightning_data(get("data_module")):
            output_shapes = self._tried(manifest, trial)
        if output_shapes:
            self._class_scores(output_shapes)
        if not self._is_lightning:
            self._check_steps(data)
        flavor = self._flavor()
        trainer_args = adapted_trainer_args(get("trainer_args"), flavor)
        common = self._common_spec(
            data, "lightning", self._fingerprint(manifest, self._model_identity())
        )
        common["callbacks"] = ()
        common["use_gpu"] = get("use_gpu") and get("num_gpus") != 0
        common["epochs"] = _epochs(trainer_args, common["epochs"], data.train_steps_per_epoch)
        common["backward_passes_per_step"] = trainer_args.pop(
            "accumulate_grad_batches", common["backward_passes_per_step"]
        )
        objects = {
            "callbacks": [*get("callbacks"), *_as_list(trainer_args.pop("callbacks", None))],
            "logger": trainer_args.pop("logger", get("logger")),
            "profiler": trainer_args.pop("profiler", get("profiler")),
            "trainer_args": trainer_args,
        }
        spec = LightningTrainSpec(
            **common,
            flavor=flavor,
            module=dump_module(self._lightning_module(flavor)),
            objects=cloudpickle.dumps(objects),
            dtypes=get("column_dtypes") if self._is_lightning else {},
            log_every_n_steps=get("log_every_n_steps"),
            terminate_on_nan=get("terminate_on_nan"),
            data_module_kwargs={
                "num_reader_epochs": get("loader_num_epochs"),
                "transformation_edit_fields": get("transformation_edit_fields"),
                "transformation_removed_fields": get("transformation_removed_fields"),
                "debug_data_loader": get("debug_data_loader"),
                "train_async_data_loader_queue_size": get("train_async_data_loader_queue_size"),
                "val_async_data_loader_queue_size": get("val_async_data_loader_queue_size"),
            },
        )
        model = self._run(
            backend,
            train,
            spec,
            lambda results: self._create_model(
                results, spec.run.run_id, column_metadata(data.columns)
            ),
        )
        if output_shapes and not model.isSet("output_shapes"):
            model._set(output_shapes=[list(shape) for shape in output_shapes])
        return model

    def _create_model(  # type: ignore[override]
        self, run_results: Sequence[TrainResult], run_id: str, metadata: Mapping[str, Any]
    ) -> LightningModel:
        """Make the model from what the ranks returned; for subclasses to override."""
        state = load_state(self._trained_state(run_results))
        if "module" in state:
            module = load_module(state["module"])
        else:
            logger.warning(
                "The trained module cannot be pickled because of %s. The model that was given "
                "comes back with the trained weights; other attributes are as before training.",
                ", ".join(state["lost"]),
            )
            module = load_module(dump_module(self.getOrDefault("model")))
            module.load_state_dict(state["weights"])
        return self.get_model_class()(
            **self._get_model_kwargs(
                model=module.eval(),
                history=[record.as_dict() for record in run_results[0].history],
                optimizer=None,
                run_id=run_id,
                metadata=metadata,
            )
        )

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        """Return the model's params; for subclasses to override.

        Called with ``model``, ``history``, ``optimizer`` (None), ``run_id`` and ``metadata``.
        """
        metadata = fitted.pop("metadata")
        return {**super()._get_model_kwargs(**fitted), "_metadata": metadata}

    def _lightning_module(self, flavor: Flavor) -> LightningModule:
        """Return the module that trains: the user's, or an adapter around it."""
        get = self.getOrDefault
        module = get("model")
        if self._is_lightning:
            adapted: LightningModule = _with_learning_rate(module, get("learning_rate"))
            return adapted
        labels = len(get("label_cols"))
        return of_flavor(ModuleAdapter, flavor)(
            module=module,
            optimizer=self._dump_optimizer(),
            tensors=self._tensor_spec(),
            losses=None if get("loss") is None else self._per_label("loss"),
            loss_constructors=None
            if get("loss_constructors") is None
            else self._per_label("loss_constructors"),
            loss_weights=get("loss_weights") or [1.0 / labels] * labels,
            metrics=self._metric_groups(),
            train_minibatch_fn=get("train_minibatch_fn"),
            passes_per_step=get("backward_passes_per_step"),
        )

    def _dry_run(self, columns: Columns) -> list[tuple[int, ...]]:
        """Run a few rows through the module, and return the shapes of what forward() gives."""
        if not self._is_lightning:
            return super()._dry_run(columns)
        get = self.getOrDefault
        module, dtypes = get("model"), get("column_dtypes")
        batch = {name: torch.from_numpy(array.copy()) for name, array in columns.items()}
        check_step(module, with_dtypes(batch, dtypes))
        features = get("feature_cols")
        if not set(features) <= set(columns):
            return []  # a transformation made other fields of them
        arrays = [columns[name] for name in features]
        inputs = forward_inputs(module, arrays, features, get("input_shapes"), dtypes)
        return row_shapes(module, inputs, self._tensor_spec()) or []


TorchEstimator = LightningEstimator


def _with_learning_rate(module: Any, rate: float | None) -> Any:
    """Return a module, or a copy that has a learning rate where Lightning's tuner puts it."""
    if rate is None:
        return module
    module = load_module(dump_module(module))
    found = False
    for name in ("learning_rate", "lr"):
        if hasattr(module, name):
            setattr(module, name, rate)
            found = True
        if name in module.hparams:
            module.hparams[name] = rate
            found = True
    if found:
        return module
    raise ParamError(
        "learning_rate: the LightningModule has neither learning_rate nor lr, itself or in its "
        "hparams. Give it one, which configure_optimizers() uses."
    )


def _epochs(trainer_args: dict[str, Any], epochs: int, steps_per_epoch: int) -> int:
    """Return the epochs of a run; where steps or time end it, the Trainer gets ``max_epochs=-1``.

    Raises
    ------
    ParamError
        If training would not take place, or not end.
    """
    given = trainer_args.pop("max_epochs", epochs)
    max_steps = trainer_args.get("max_steps", -1)
    if given is None and (max_steps != -1 or trainer_args.get("max_time")):
        given = -1
    given = epochs if given is None else given
    if given > 0:
        return int(given)
    if given != -1 or max_steps == 0:
        raise ParamError(
            f"trainer_args: max_epochs={given}, max_steps={max_steps} train nothing. Set "
            "max_epochs to 1 or more, or to -1 with max_steps or max_time."
        )
    if max_steps == -1 and not trainer_args.get("max_time"):
        raise ParamError(
            "trainer_args: max_epochs=-1 trains without end. Set max_steps or max_time."
        )
    trainer_args["max_epochs"] = -1
    passes = trainer_args.get("accumulate_grad_batches", 1)
    return math.ceil(max_steps * passes / steps_per_epoch) if max_steps > 0 else 1_000_000


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return [value]
