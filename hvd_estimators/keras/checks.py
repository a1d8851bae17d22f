"""Checks of a Keras fit's params. Runs on the driver."""

from __future__ import annotations

import logging

import keras

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.checks import check_class_weight
from hvd_estimators.keras.backend import (
    all_layers,
    further_optimizers,
    has_own_compile,
    has_own_step,
    is_tensorflow_variable,
    model_optimizers,
)
from hvd_estimators.keras.custom_objects import is_remembered
from hvd_estimators.keras.losses import NO_LOSS, has_loss, may_add_loss
from hvd_estimators.keras.settings import KerasSettings
from hvd_estimators.keras.user_callbacks import check_callbacks

logger = logging.getLogger(__name__)


def check_model(settings: KerasSettings) -> None:
    """Check that the model is one of Keras 3."""
    model = settings.model
    if type(model).__module__.startswith(("tf_keras", "tensorflow.python.keras")):
        raise ParamError(
            f"model: it is of Keras 2 ({type(model)}), and this estimator trains Keras 3. Make "
            "it of the package keras instead of tf_keras, and unset TF_USE_LEGACY_KERAS."
        )
    if not isinstance(model, keras.Model):
        raise ParamError(f"model: expected a keras.Model, found {type(model)}.")


def _check_loss_names(settings: KerasSettings) -> None:
    for name in keras.tree.flatten(settings.loss):
        # Keras chooses a loss for these names by the shapes.
        if isinstance(name, str) and name.lower() not in ("crossentropy", "ce"):
            try:
                keras.losses.get(name)
            except ValueError:
                raise ParamError(
                    f"loss: Keras has no loss {name!r}. Set one of keras.losses, such as 'mse', or "
                    "the function itself."
                ) from None


def check_params(settings: KerasSettings) -> None:
    """Check model, optimizer, loss, metrics, callbacks and labels together."""
    if not settings.label_cols:
        _check_without_labels(settings)
    model = settings.model
    if settings.optimizer is None and not model.compiled:
        raise ParamError("optimizer is not set. Set optimizer, or compile the model with one.")
    if settings.learning_rate is not None and further_optimizers(model):
        raise ParamError(
            "learning_rate: it sets the rate of one optimizer, and the model has others in its "
            "attributes. Leave it out, and set the rates of the optimizers."
        )
    if has_own_compile(model):
        _check_own_compile(settings)
    else:
        settings.optimizer_object()
    _check_loss_names(settings)
    has_way = settings.loss is not None or has_loss(model) or has_own_step(model)
    if not has_way and not may_add_loss(model):
        raise ParamError(NO_LOSS)
    if any(getattr(layer, "synchronized", False) for layer in all_layers(model)):
        raise ParamError(
            "model: Keras synchronizes BatchNormalization(synchronized=True) for tf.distribute "
            "only. Leave synchronized out: statistics are averaged at the end of each epoch. Or "
            "use LayerNormalization or GroupNormalization, which need no other rows."
        )
    _warn_of_unsaved_variables(model)
    check_callbacks(settings.callbacks)
    checkpoint = settings.checkpoint_callback
    if checkpoint is not None and not isinstance(checkpoint, keras.callbacks.ModelCheckpoint):
        raise ParamError(
            "checkpoint_callback: expected a keras.callbacks.ModelCheckpoint, found "
            f"{checkpoint!r}."
        )
    if settings.buffer_reduction:
        raise ParamError(
            "buffer_reduction: Keras's variables that layers compute are averaged over the ranks. "
            "Leave it out, and keep values of which the mean is right."
        )
    check_class_weight(settings)
    label_shapes = settings.label_shapes
    if label_shapes is not None and len(label_shapes) != len(settings.label_cols):
        raise ParamError(
            f"label_shapes: expected one shape per label, {len(settings.label_cols)}, found "
            f"{len(label_shapes)}."
        )


def _warn_of_unsaved_variables(model: keras.Model) -> None:
    """Warn of variables that Keras neither trains nor saves."""
    unsaved = sorted(
        f"{layer.name}.{name}"
        for layer in all_layers(model)
        for name, value in vars(layer).items()
        if is_tensorflow_variable(value)
    )
    if unsaved:
        logger.warning(
            "model: Keras saves no tf.Variable, so checkpoints and the fitted model lose what "
            "training assigns to %s. Use add_weight(trainable=False) or a keras.Variable.",
            ", ".join(unsaved),
        )


def _check_without_labels(settings: KerasSettings) -> None:
    """Check that a model without labels does not compare its outputs to labels."""
    model = settings.model
    given = settings.loss is not None or bool(settings.metrics)
    if given or (model.loss is not None and not has_own_step(model)):
        raise ParamError(
            "found [], and loss or metrics compare outputs to labels. Set "
            "label_cols (an autoencoder's are its features). Or remove loss and metrics, and "
            "define train_step() or compute_loss() in the model, or call add_loss() in it.",
            param="label_cols",
        )
    if settings.sample_weight_col:
        raise ParamError(
            "Keras weights the losses of labels, and label_cols is []. Add "
            "the column to feature_cols and use it in the model's own loss.",
            param="sample_weight_col",
        )


def _check_own_compile(settings: KerasSettings) -> None:
    """Check that a model with its own ``compile`` is compiled and needs no other settings."""
    names = ("optimizer", "loss", "loss_weights", "metrics", "learning_rate")
    given = [name for name in names if settings.get(name) not in (None, [])]
    if given or not is_remembered(settings.model):
        raise ParamError(
            f"model: its class {type(settings.model).__name__} has its own compile(), whose "
            "arguments Keras does not know. Set model to a function that makes and compiles it, "
            f"and leave {', '.join(names)} out; found {', '.join(given) or 'a model'}."
        )
    if not model_optimizers(settings.model):
        raise ParamError(
            "model: expected a Keras optimizer in the model or among its attributes, found "
            "none. Let its compile() keep its optimizers as attributes."
        )
