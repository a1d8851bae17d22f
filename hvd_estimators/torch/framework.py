"""Interface between a fit and torch. Runs on the driver."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvd_estimators.data.arrays import Columns, take
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.data.rows import ROWS, RowTable
from hvd_estimators.exceptions import HvdEstimatorsError, ParamError
from hvd_estimators.fitting.checks import check_collectives
from hvd_estimators.fitting.fingerprint import named
from hvd_estimators.fitting.framework import WEIGHT_REMEDY, Fittable, Framework, build, is_function
from hvd_estimators.fitting.planning import rows_of_model
from hvd_estimators.fitting.trial import Trial, check_sendable, repeated
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.store.base import as_store
from hvd_estimators.torch.checks import (
    STEP_PARAMS,
    check_batch_size,
    check_column_dtypes,
    check_scheduler_length,
    check_sharding,
    check_training,
)
from hvd_estimators.torch.dry_run import (
    check_batches,
    check_fit,
    check_own_step,
    needs_two_rows,
    output_shapes,
    takes_one_row,
    with_any_size,
)
from hvd_estimators.torch.loss import ignored_class, is_mean_of_elements, takes_class_indices
from hvd_estimators.torch.optimizer_step import StepOptions, autocast, learning_rates
from hvd_estimators.torch.serialization import Pickler, check_parameters, module_file, plain_module
from hvd_estimators.torch.settings import TorchSettings
from hvd_estimators.torch.stored_weights import made_without_weights, stored_weights
from hvd_estimators.torch.trainer import TorchTrainSpec, TrainedObjects, train
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.row_weights import check_classes
from hvd_estimators.training.spec import TrainSpec, combined_digest

logger = logging.getLogger(__name__)


class TorchFramework(Framework):
    """The part of a fit that `TorchEstimator` has by itself."""

    settings_class = TorchSettings
    name = "torch"
    train: Trainer = staticmethod(train)
    model_class = torch.nn.Module
    tensor_library = "torch"
    sent = (
        *Framework.sent,
        *("loss", "loss_constructors", "metrics", "train_minibatch_fn", "stateful", "lr_scheduler"),
        "batch_size_fn",
    )
    run_settings = (
        *Framework.run_settings,
        *("input_shapes", "input_form", "column_dtypes"),
        *("loss", "loss_constructors", "train_minibatch_fn"),
    )
    optional_run_settings = (
        *Framework.optional_run_settings,
        *("loss_form", "class_weight", "only_trainable", "init_weights", *STEP_PARAMS),
    )
    settings: TorchSettings

    @classmethod
    def with_objects(cls, estimator: Fittable) -> Fittable:
        function, path = map(estimator.getOrDefault, ("model", "init_weights"))
        has_base = estimator.getOrDefault("only_trainable")
        if path is not None:
            if not is_function(function):
                raise ParamError(
                    f"found a {type(function).__name__} as model beside it. Set model to a "
                    "function that makes the module.",
                    param="init_weights",
                )
            store = as_store(estimator.getOrDefault("store"))

            @functools.wraps(function)
            def make(**arguments: Any) -> torch.nn.Module:
                return made_without_weights(function, path, store, has_base, **arguments)

            # Only the ranks have the weights to try.
            estimator = estimator.copy({"model": make, "dry_run": False})
        elif has_base:
            raise ParamError(
                "found no init_weights, whose files have the frozen weights that the fitted model "
                "leaves out. Set it to a safetensors file or a folder of them, such as "
                "save_pretrained() of Hugging Face writes.",
                param="only_trainable",
            )
        estimator = super().with_objects(estimator)
        model, optimizer = map(estimator.getOrDefault, ("model", "optimizer"))
        if isinstance(model, torch.nn.Module) and is_function(optimizer):
            built = build("optimizer", optimizer, torch.optim.Optimizer, model.parameters())
            return estimator.copy({"optimizer": built})
        return estimator

    @classmethod
    def with_label_types(cls, estimator: Fittable, numbers: Collection[str]) -> Fittable:
        settings: TorchSettings = cls.settings_class.of(estimator)
        # A function of the user may change the shape of labels, and a user's step their type.
        has_own_step = settings.train_minibatch_fn is not None
        if settings.is_joint or settings.makes_values or has_own_step:
            return estimator
        losses = settings.losses_in("loss") or ()
        dtypes = {
            label: "int64"
            for label, loss in zip(settings.label_cols, losses, strict=False)
            if takes_class_indices(loss) and label in numbers
        }
        if dtypes.keys() <= settings.column_dtypes.keys():
            return estimator
        return estimator.copy({"column_dtypes": {**dtypes, **settings.column_dtypes}})

    def check(self) -> None:
        settings = self.settings
        check_batch_size(settings)
        self.check_training()
        check_collectives(self)
        check_sharding(settings)
        check_column_dtypes(settings)
        super().check()
        model = plain_module(settings.model)
        if isinstance(model, torch.nn.Module):
            check_parameters(model, None)
        if not isinstance(model, torch.jit.ScriptModule):
            check_sendable("model", settings.model, Pickler)
        if isinstance(settings.optimizer, torch.optim.Optimizer):
            check_sendable("optimizer", settings.optimizer, Pickler)

    def check_training(self) -> None:
        """Check model, optimizer, loss and metrics together."""
        check_training(self.settings)

    def dry_run(self, columns: Columns) -> Trial:
        trial = self._tried(columns)
        return replace(trial, class_limits=self._class_limits(trial.output_shapes or ()))

    def _tried(self, columns: Columns) -> Trial:
        settings = self.settings
        shapes = None
        if settings.train_minibatch_fn is not None:
            shapes = check_own_step(
                settings.model,
                settings.optimizer,
                settings.objective(),
                settings.delivered(columns),
                settings.backward_passes_per_step,
            )
            if settings.validation is None:
                return Trial(shapes or None)
        tensors = settings.tensor_spec
        with autocast(settings.precision, "cpu"):
            tried = check_fit(
                *(settings.model, settings.objective(), settings.delivered(columns)),
                validates=settings.validation is not None,
            )

        def call(rows: int) -> Callable[[Any], Any]:
            inputs = tensors.inputs(settings.delivered(repeated(columns, rows)))
            return lambda module: tensors.call(module, inputs)

        one_row = takes_one_row(settings.model, call(1), [call(2), call(3)])
        found: Sequence[tuple[int | None, ...]] = tried or shapes or ()
        predicted = None
        if found and settings.collate is not None:

            def with_singles(columns: Columns, shapes: Any = None) -> Any:
                parts = [columns, take(columns, slice(1)), take(columns, slice(-1, None))]
                inputs, *singles = [tensors.inputs(settings.delivered(part)) for part in parts]
                shapes = shapes or output_shapes(settings.model, tensors, inputs)
                return with_any_size(shapes, settings.model, tensors, singles)

            found = with_singles(columns, found)
            rows: Any = columns[ROWS]
            features = RowTable(rows.table.select(settings.all_feature_cols))
            # A function or a model that needs labels does not predict.
            with contextlib.suppress(HvdEstimatorsError):
                predicted = with_singles({ROWS: features})  # type: ignore[dict-item]
        return Trial(found or None, one_row, predicted_shapes=predicted)

    def check_trial(self, trial: Trial, manifest: DatasetManifest) -> None:
        settings = self.settings
        is_plain = settings.transformation is None and settings.collate is None
        if settings.class_weight and is_plain:
            (label,) = settings.label_cols
            check_classes(label, rows_of_model(settings, manifest)[label])

    def tensor_dtype(
        self, name: str, stored: str, trial: Trial
    ) -> tuple[str, Callable[[str], str]]:
        if name == self.settings.sample_weight_col:
            return "float32", lambda dtype: WEIGHT_REMEDY

        def remedy(dtype: str) -> str:
            # Losses of numbers take no integers.
            wanted = "float64" if name in self.settings.label_cols else dtype
            return f"Set column_dtypes={{{name!r}: {wanted!r}}}."

        dtype: str = self.settings.column_dtypes.get(name, "float32")
        return dtype, remedy

    def _class_limits(
        self, shapes: Sequence[tuple[int | None, ...]]
    ) -> dict[str, tuple[int, float | None]]:
        """Return the number of classes, and the ignored number, by label of class numbers."""
        settings = self.settings
        if settings.is_joint or settings.train_minibatch_fn is not None:
            return {}
        limits: dict[str, tuple[int, float | None]] = {}
        losses = settings.losses_in("loss") or ()
        for label, loss, shape in zip(settings.label_cols, losses, shapes, strict=False):
            is_number = settings.column_dtypes.get(label, "").startswith("int")
            if takes_class_indices(loss) and is_number and shape and shape[0] is not None:
                limits[label] = shape[0], ignored_class(loss)
        return limits

    def learning_rates(self, trial: Trial) -> list[float]:
        optimizer = self.settings.optimizer
        own = learning_rates(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
        return super().learning_rates(trial) or own

    def model_identity(self, trial: Trial) -> dict[str, Any]:
        settings = self.settings
        return _model_fingerprint(
            settings.model, settings.optimizer, settings.learning_rate is not None
        )

    def min_batch_rows(self, trial: Trial) -> int:
        return 2 if needs_two_rows(self.settings.model, trial.takes_one_row) else 1

    def check_ranks(self, data: DataSpec) -> None:
        """Check what depends on the number of ranks, as far as Lightning shares it."""
        if self.settings.sharding != "none" and data.num_ranks == 1:
            logger.warning(
                "sharding: one process has nothing to share, so sharding and "
                "activation_checkpointing have no effect."
            )

    def make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        settings = self.settings
        own_step = settings.train_minibatch_fn is not None
        all_rows = settings.train_steps_per_epoch is None
        self.check_ranks(common.data)
        check_batches(settings.model, common.data, own_step, all_rows, trial.takes_one_row)
        check_scheduler_length(settings, common)
        if common.data.num_shards > 1 or settings.batch_size_fn is not None:
            self._warn_of_padded_means()
        return TorchTrainSpec(
            **{**vars(common), "callbacks": ()},
            collectives=self.collectives,
            sharding=settings.sharding_options,
            objects=module_file(self.trained_objects(), settings.stateful or ()),
        )

    def _warn_of_padded_means(self) -> None:
        settings = self.settings
        losses = settings.losses_in("loss") or ()
        for label, loss in zip(settings.label_cols, losses, strict=False):
            padded = settings.padding or ()
            if label in padded and not settings.is_joint and is_mean_of_elements(loss):
                logger.warning(
                    "padding: the label %r is padded, and its loss is a mean over all elements, "
                    "also over the padding, whose length depends on num_proc and batch_size_fn. "
                    "The weights then depend on them, too. Set loss to a function that returns "
                    "{'loss': mean, 'denominator': count} of the elements that count.",
                    label,
                )

    def trained_objects(self) -> TrainedObjects:
        settings = self.settings
        return TrainedObjects(
            module=settings.model,
            optimizer=settings.optimizer,
            callbacks=tuple(settings.callbacks),
            stateful=tuple(settings.stateful or ()),
            objective=settings.objective(),
            options=StepOptions(**{name: settings.values[name] for name in STEP_PARAMS}),
            learning_rate=settings.learning_rate,
            returned={
                name: settings.get(name) for name in ("loss", "loss_constructors", "metrics")
            },
        )


def _model_fingerprint(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, other_rate: bool
) -> dict[str, Any]:
    """Return the fingerprint: layers, shapes of weights, and the optimizer's options.

    Parameters
    ----------
    module : torch.nn.Module
        The model. A compiled module has the fingerprint of the original module.
    optimizer : torch.optim.Optimizer or None
        None if the module creates the optimizer on the ranks.
    other_rate : bool
        Whether a param replaces the optimizer's learning rate.
    """
    module = plain_module(module)
    weights = stored_weights(module)
    identity: dict[str, Any] = {
        "class": named(type(module)),
        # Remove memory addresses, which may appear for functions among a module's attributes.
        "layers": re.sub(r" at 0x[0-9a-f]+", "", repr(module)),
        "weights": [
            [name, None if is_lazy(value) else list(value.shape), str(value.dtype)]
            for name, value in module.state_dict().items()
            if isinstance(value, torch.Tensor)
        ],
    }
    if weights is not None and weights.is_base:
        digests = {file.name: file.sha256 for file in weights.files}
        identity["frozen weights"] = combined_digest(digests)
    if optimizer is not None:
        # The param that replaces the optimizer's rate is one of the run settings.
        left_out = {"params", "initial_lr"} | ({"lr"} if other_rate else set())
        identity["optimizer"] = named(type(optimizer))
        identity["options"] = {
            f"group {number}": {
                key: named(_number(value)) for key, value in group.items() if key not in left_out
            }
            for number, group in enumerate(optimizer.param_groups)
        }
    return identity


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
