"""Settings of a Keras fit: the params, and copies of model and compile arguments.

Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras

from hvd_estimators._util.random_state import kept_random_state
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.settings import Settings
from hvd_estimators.fitting.trial import causes
from hvd_estimators.keras.backend import has_own_compile, has_own_step
from hvd_estimators.keras.compile_args import CompileSettings, losses, optimizer_state, sums
from hvd_estimators.keras.custom_objects import Recipe, UnequalCopyError
from hvd_estimators.keras.losses import kind_of_outputs, without_reduction
from hvd_estimators.keras.serialization import copy_model, dump, load
from hvd_estimators.keras.tensors import input_structure, text_columns
from hvd_estimators.keras.user_callbacks import selects_by_metric


@dataclass(frozen=True)
class KerasSettings(Settings):
    """The params of `KerasEstimator` in one fit."""

    @cached_property
    def text_cols(self) -> Mapping[str, bool]:
        """The columns of text inputs, or all columns if the inputs are unknown.

        If the inputs are unknown, bytes stay arrays of numbers, since images are stored as bytes.
        """
        if self.collate_fn is not None:
            return {}
        masks = [f"{name}_mask" for name in self.padding or () if name in self.inputs.names]
        names = [*self.inputs.names, *(masks if self.masks else [])]
        return text_columns(input_structure(self.model, names))

    def kind_of_loss(self, shape: tuple[int | None, ...] | None) -> str | None:
        model, given = self.model, self.loss
        if has_own_step(model) or len(self.label_cols) != 1:
            return None
        entries = losses(getattr(model, "loss", None) if given is None else given)
        return kind_of_outputs(model, entries[0], shape) if len(entries) == 1 else None

    @property
    def _selecting(self) -> list[keras.callbacks.ModelCheckpoint]:
        """The callback that selects the epoch that a fit returns, if any."""
        callback = self.checkpoint_callback
        return [callback] if callback is not None and selects_by_metric(callback) else []

    @property
    def selecting_callbacks(self) -> Sequence[Any]:
        return [*self._selecting, *self.callbacks]

    @property
    def monitors(self) -> list[tuple[str, str | None]]:
        what = "checkpoint_callback: its monitor"
        return [*super().monitors, *((what, each.monitor) for each in self._selecting)]

    @property
    def has_own_tensorboard(self) -> bool:
        return any(isinstance(each, keras.callbacks.TensorBoard) for each in self.callbacks)

    @property
    def rank_environment(self) -> Mapping[str, str | None]:
        return {"KERAS_BACKEND": keras.backend.backend(), **self.backend_env}

    def optimizer_object(self) -> keras.optimizers.Optimizer:
        """Return the optimizer, as Keras makes it of a name, or the compiled model's."""
        given = self.optimizer
        if given is None:
            given = self.model.optimizer
        try:
            return keras.optimizers.get(given)
        except (TypeError, ValueError) as error:
            raise ParamError(f"optimizer: expected a Keras optimizer, found {given!r}.") from error

    def training_model(self) -> keras.Model:
        """Return a copy of the model, not compiled."""
        objects = self.custom_objects
        with kept_random_state():
            try:
                copy = copy_model(self.model, objects)
            except Exception as error:
                *_, first = causes(error)
                reason = error if isinstance(error, UnequalCopyError) else first
                # Keras adds an example of several lines.
                text = " ".join(str(reason).strip().partition("\n\n")[0].split())
                raise ParamError(
                    "model: Keras cannot make equal copies of it for the ranks "
                    f"({type(reason).__name__}: {text}). Set model to a function that makes it, "
                    "with arguments in model_args. Or give each class of its layers a get_config() "
                    "with all arguments of the constructor, and a from_config() where arguments "
                    "are Keras objects, and name functions (def) instead of lambdas."
                ) from error
        return copy

    def compile_settings(self) -> CompileSettings:
        """Return the arguments for compiling the model for training."""
        given: keras.Model = self.model
        compiled = dict(given._compile_config.config) if given.compiled else {}
        if compiled.pop("optimizer", None) is not None and self.optimizer is None:
            # Keras has scaled the loss of this optimizer already, if the user wanted it.
            compiled["auto_scale_loss"] = False
        params = {
            name: self.get(name) for name in ("loss", "loss_weights") if self.get(name) is not None
        }
        if self.metrics:
            params["metrics"] = self.metrics
        if has_own_compile(given):
            return self._checked(CompileSettings(None, (), compiled, {}, self.label_cols))
        try:
            given_optimizer = self.optimizer_object()
            optimizer = Recipe.of(given_optimizer, self.custom_objects)
            made = optimizer.make()
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ParamError(
                f"optimizer: its config makes no copy for the ranks ({type(error).__name__}: "
                f"{error}). Give its class a get_config() with all arguments of the constructor, "
                "and a MultiOptimizer an OptimizerMap, not a function. Set custom_objects to "
                "classes and functions that the config names."
            ) from error
        try:
            compiled, params = load(dump((compiled, params), self.custom_objects))
        except Exception as error:
            raise ParamError(
                "loss, metrics: Keras cannot make equal copies for the ranks "
                f"({type(error).__name__}: {error}). Give the class a get_config() with all "
                "arguments of the constructor."
            ) from error
        rate = self.learning_rate
        if rate is not None:
            try:
                made.learning_rate = rate
            except (TypeError, AttributeError) as error:
                raise ParamError(
                    f"learning_rate: {type(made).__name__} does not let it be set ({error}). Leave "
                    "learning_rate out, or give an optimizer with a number as its rate."
                ) from error
        state = optimizer_state(given_optimizer)
        return self._checked(
            CompileSettings(optimizer, state, compiled, params, self.label_cols, rate)
        )

    def _checked(self, compiled: CompileSettings) -> CompileSettings:
        """Return compile arguments whose losses can be reduced over ranks."""
        unreduced = without_reduction(compiled.loss)
        if unreduced:
            raise ParamError(
                f"loss: expected a loss with one number per batch, found {unreduced[0]!r} with "
                f"reduction={unreduced[0].reduction!r}. Set reduction='sum_over_batch_size', "
                "'mean_with_sample_weight' or 'sum'."
            )
        if sums(compiled.loss) and self.backward_passes_per_step > 1:
            raise ParamError(
                "backward_passes_per_step: expected 1 for a loss with reduction='sum', found "
                f"{self.backward_passes_per_step}. Set reduction='sum_over_batch_size'."
            )
        return compiled
