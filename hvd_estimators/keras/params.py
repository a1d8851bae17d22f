"""Params of Keras estimators. Runs on the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.serialization import OptimizerPayload, dump
from hvd_estimators.keras.user_callbacks import reject_callback_list
from hvd_estimators.params import integer, narrowed, numbers, objects, param


def environment(name: str, value: Mapping[str, Any]) -> dict[str, str | None]:
    """Accept a dict of variable names to values."""
    if not isinstance(value, Mapping):
        raise ParamError(f"{name}: expected a dict of variable to value, found {value!r}.")
    return {str(key): None if entry is None else str(entry) for key, entry in value.items()}


def label_weights(
    name: str, value: float | Sequence[float] | Mapping[str, float]
) -> list[float] | dict[str, float]:
    """Accept weights as a list, or as a dict with names of labels or outputs as keys."""
    if isinstance(value, Mapping):
        return {str(key): numbers(name, weight)[0] for key, weight in value.items()}
    return numbers(name, value)


def _callbacks(name: str, value: Iterable[Any]) -> list[Any]:
    reject_callback_list(name, value)
    return objects(name, value)


def _custom_objects(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ParamError(
            f"{name}: expected a dict of name to class or function, found {value!r}. Set "
            "{'MyLayer': MyLayer}."
        )
    return dict(value)


class KerasParams(HorovodEstimator):
    """Params for compiling and training a Keras model."""

    model = narrowed(HorovodEstimator, "model", "keras.Model | Callable[..., keras.Model]")
    optimizer = param(
        "The optimizer, or its name. Its learning rate is for one rank. Default: the optimizer "
        "of the compiled model."
    )
    loss = param(
        "A loss for all labels, a list with one per label, or a dict by the names of labels or "
        "outputs. Default: the loss of the compiled model; none if the model calls add_loss()."
    )
    loss_weights = param(
        "Weights of the labels' losses, as a list, or as a dict with the keys of loss. Default: 1.",
        convert=label_weights,
    )
    metrics = param(
        "A list of Keras metrics. For several labels: a list with a metric or a list per label, "
        "or a dict with the keys of loss. Default: the metrics of the compiled model, if loss "
        "is not set.",
        default=[],
    )
    callbacks = param("Keras callbacks.", default=[], convert=_callbacks)
    custom_objects = param(
        "Dict of name to custom class or function of the model. Classes of its layers are found "
        "without it.",
        default={},
        convert=_custom_objects,
    )
    checkpoint_callback = param(
        "A keras.callbacks.ModelCheckpoint that selects the returned model, such as "
        "BestModelCheckpoint(monitor='val_loss'). Its path is replaced. Default: the model "
        "after the last epoch.",
        type="keras.callbacks.ModelCheckpoint",
    )
    backend_env = param(
        "Environment variables of the ranks; None deletes a variable.",
        default={},
        convert=environment,
    )
    tensorflow_dataset_prefetch_buffer_size = param(
        "Number of prefetched batches, in addition to some MiB of rows that are not batched yet.",
        default=0,
        convert=integer(0),
    )

    def _dump_param(self, name: str, value: Any) -> bytes:
        if name == "optimizer" and isinstance(value, keras.optimizers.Optimizer):
            value = OptimizerPayload.of(value, self.getOrDefault("custom_objects"))
        return dump(value, self.getOrDefault("custom_objects"))

    def _load_params(self, documents: dict[str, bytes]) -> dict[str, Any]:
        values = super()._load_params(documents)
        document = values.get("optimizer")
        if isinstance(document, OptimizerPayload):
            optimizer = values["optimizer"] = document.make()
            model = values.get("model", self.getOrDefault("model"))
            if model is not None and model.built:
                document.restore(optimizer, model.trainable_variables)
        return values
