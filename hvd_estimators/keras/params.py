"""Params of Keras estimators. Runs on the driver."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.trial import causes
from hvd_estimators.keras.backend import (
    all_layers,
    further_optimizers,
    has_own_compile,
    has_own_step,
    kept_random_state,
    model_optimizers,
    require_backend,
)
from hvd_estimators.keras.collectives import reductions_of
from hvd_estimators.keras.compile_args import CompileSettings, losses
from hvd_estimators.keras.custom_objects import UnequalCopyError
from hvd_estimators.keras.dry_run import LAMBDA_REMEDY
from hvd_estimators.keras.losses import (
    NO_LOSS,
    find_metric,
    has_loss,
    kind_of_outputs,
    may_add_loss,
    weights_by_samples,
    without_reduction,
)
from hvd_estimators.keras.serialization import OptimizerPayload, copy_model, dump, load
from hvd_estimators.keras.tensors import input_structure, text_columns
from hvd_estimators.keras.user_callbacks import check_callbacks, reject_callback_list
from hvd_estimators.params import integer, narrowed, numbers, objects, param
from hvd_estimators.params.estimator import ClassWeightParams, CollectivesParams, LoggerParams


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


logger = logging.getLogger(__name__)


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


class KerasParams(ClassWeightParams, CollectivesParams, LoggerParams, HorovodEstimator):
    """Params for compiling and training a Keras model."""

    _model_class = keras.Model

    _tensor_library = str(keras.backend.backend())

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

    _run_settings = (*HorovodEstimator._run_settings, "class_weight")
    _sent = (*HorovodEstimator._sent, "checkpoint_callback")
    # Keras objects are serialized separately.
    _sent_functions = ("loss", "metrics")

    @contextlib.contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        with kept_random_state():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield

    def _check_params(self) -> None:
        get = self.getOrDefault
        require_backend()
        self._check_collectives()
        # The remaining checks need the model.
        self._check_model()
        super()._check_params()
        if not get("label_cols"):
            self._check_without_labels()
        model = get("model")
        if get("optimizer") is None and not model.compiled:
            raise ParamError("optimizer is not set. Set optimizer, or compile the model with one.")
        if get("learning_rate") is not None and further_optimizers(model):
            raise ParamError(
                "learning_rate: it sets the rate of one optimizer, and the model has others in its "
                "attributes. Leave it out, and set the rates of the optimizers."
            )
        if has_own_compile(model):
            self._check_own_compile()
        else:
            self._optimizer()
        has_way = get("loss") is not None or has_loss(model) or has_own_step(model)
        if not has_way and not may_add_loss(model):
            raise ParamError(NO_LOSS)
        check_callbacks(get("callbacks"))
        self._check_compiled_with()
        if model.built:
            # A model that the dry run builds is checked after the dry run.
            reductions_of(model, get("buffer_reduction"))
        checkpoint = get("checkpoint_callback")
        if checkpoint is not None and not isinstance(checkpoint, keras.callbacks.ModelCheckpoint):
            raise ParamError(
                "checkpoint_callback: expected a keras.callbacks.ModelCheckpoint, found "
                f"{checkpoint!r}."
            )
        self._check_class_weight(get("label_cols"))
        label_shapes = get("label_shapes")
        if label_shapes is not None and len(label_shapes) != len(get("label_cols")):
            raise ParamError(
                f"label_shapes: expected one shape per label, {len(get('label_cols'))}, found "
                f"{len(label_shapes)}."
            )

    def _check_without_labels(self) -> None:
        """Check that a model without labels does not compare its outputs to labels."""
        get = self.getOrDefault
        model = get("model")
        given = get("loss") is not None or bool(get("metrics"))
        if given or (model.loss is not None and not has_own_step(model)):
            raise ParamError(
                "label_cols: found [], and loss or metrics compare outputs to labels. Set "
                "label_cols (an autoencoder's are its features). Or remove loss and metrics, and "
                "define train_step() or compute_loss() in the model, or call add_loss() in it."
            )
        if get("sample_weight_col"):
            raise ParamError(
                "sample_weight_col: Keras weights the losses of labels, and label_cols is []. Add "
                "the column to feature_cols and use it in the model's own loss."
            )

    def _check_compiled_with(self) -> None:
        """Check that Keras recognizes the loss and the metrics."""
        get = self.getOrDefault
        for name, find in (("loss", keras.losses.get), ("metrics", find_metric)):
            for entry in keras.tree.flatten(get(name)):
                if entry is None:
                    continue
                if isinstance(entry, type):
                    raise ParamError(f"{name}: found the class {entry!r}. Set an object of it.")
                try:
                    find(entry)
                except (TypeError, ValueError) as error:
                    raise ParamError(
                        f"{name}: Keras does not know {entry!r}. Set a name that Keras knows, an "
                        "object or a function."
                    ) from error

    def _check_model(self) -> None:
        model = self.getOrDefault("model")
        if model is None:
            raise ParamError("model is not set. Set model.")
        if type(model).__module__.startswith(("tf_keras", "tensorflow.python.keras")):
            raise ParamError(
                f"model: it is of Keras 2 ({type(model)}), and this estimator trains Keras 3. Make "
                "it of the package keras instead of tf_keras, and unset TF_USE_LEGACY_KERAS."
            )
        if not isinstance(model, keras.Model):
            raise ParamError(f"model: expected a keras.Model, found {type(model)}.")

    def _check_own_compile(self) -> None:
        """Check that a model with its own ``compile`` is compiled and needs no other settings."""
        get = self.getOrDefault
        names = ("optimizer", "loss", "loss_weights", "metrics", "learning_rate")
        given = [name for name in names if get(name) not in (None, [])]
        if given or not get("model").compiled:
            raise ParamError(
                f"model: its class {type(get('model')).__name__} has its own compile(), which only "
                "you can call. Compile the model, and leave optimizer, loss, loss_weights, metrics "
                "and learning_rate out; found "
                f"{', '.join(given) or 'a model that is not compiled'}."
            )
        if not model_optimizers(get("model")):
            raise ParamError(
                "model: expected a Keras optimizer in the model or among its attributes, found "
                "none. Let its compile() keep its optimizers as attributes."
            )

    def _text_cols(self) -> Mapping[str, bool]:
        """Return the columns of text inputs, or all columns if the inputs are unknown.

        If the inputs are unknown, bytes stay arrays of numbers, since images are stored as bytes.
        """
        model = self.getOrDefault("model")
        return text_columns(input_structure(model, self._input_columns().names))

    def _optimizer(self) -> keras.optimizers.Optimizer:
        given = self.getOrDefault("optimizer")
        if given is None:
            given = self.getOrDefault("model").optimizer
        try:
            return keras.optimizers.get(given)
        except (TypeError, ValueError) as error:
            raise ParamError(f"optimizer: expected a Keras optimizer, found {given!r}.") from error

    def _training_model(self) -> keras.Model:
        """Return a copy of the model, not compiled."""
        objects = self.getOrDefault("custom_objects")
        with kept_random_state():
            try:
                copy = copy_model(self.getOrDefault("model"), objects)
            except Exception as error:
                reason = _first_reason(error)
                if isinstance(reason, NameError):
                    raise ParamError(
                        f"model: its layers fail on the ranks (NameError: {reason}). "
                        f"{LAMBDA_REMEDY}"
                    ) from error
                lambda_argument = _lambda_argument(self.getOrDefault("model"))
                if lambda_argument is not None and "Could not interpret" in str(reason):
                    raise ParamError(
                        f"model: {lambda_argument} is a lambda, which Keras cannot copy for the "
                        "ranks. Set it to a named function (def)."
                    ) from error
                raise ParamError(
                    "model: Keras cannot make equal copies of it for the ranks "
                    f"({type(reason).__name__}: {reason}). Give each class of its layers a "
                    "get_config() with all arguments of the constructor, and a from_config() "
                    "where arguments are Keras objects; or keep each argument in an attribute of "
                    "its name. Leave out of attributes what belongs to this process, such as "
                    "open files, locks and datasets."
                ) from error
        return copy

    def _told_by_loss(self, shape: tuple[int | None, ...] | None) -> str | None:
        model, given = self.getOrDefault("model"), self.getOrDefault("loss")
        if has_own_step(model) or len(self.getOrDefault("label_cols")) != 1:
            return None
        entries = losses(getattr(model, "loss", None) if given is None else given)
        return kind_of_outputs(model, entries[0], shape) if len(entries) == 1 else None

    def _compile_settings(self) -> CompileSettings:
        """Return the arguments for compiling the model for training."""
        get = self.getOrDefault
        given: keras.Model = get("model")
        compiled = dict(given._compile_config.config) if given.compiled else {}
        compiled.pop("optimizer", None)
        if compiled.get("jit_compile"):
            logger.warning(
                "jit_compile is turned off while the ranks train: XLA cannot compile operations "
                "between ranks. Compile the model with jit_compile=False to leave this out."
            )
        params = {name: get(name) for name in ("loss", "loss_weights") if get(name) is not None}
        if get("metrics"):
            params["metrics"] = get("metrics")
        if has_own_compile(given):
            settings = CompileSettings(None, compiled, {}, get("label_cols"))
            self._weights_by_samples(settings)
            return settings
        try:
            optimizer = OptimizerPayload.of(self._optimizer(), get("custom_objects"))
            made = optimizer.make()
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ParamError(
                f"optimizer: its config makes no copy for the ranks ({type(error).__name__}: "
                f"{error}). Give its class a get_config() with all arguments of the constructor, "
                "or keep each argument in an attribute of its name. Give a MultiOptimizer an "
                "OptimizerMap, not a function; set custom_objects to classes and functions that "
                "the config names."
            ) from error
        compiled, params = self._copied(compiled), self._copied(params)
        rate = get("learning_rate")
        if rate is not None:
            try:
                made.learning_rate = rate
            except (TypeError, AttributeError) as error:
                raise ParamError(
                    f"learning_rate: {type(made).__name__} does not let it be set ({error}). Leave "
                    "learning_rate out, or give an optimizer with a number as its rate."
                ) from error
        settings = CompileSettings(optimizer, compiled, params, get("label_cols"), rate)
        self._weights_by_samples(settings)
        return settings

    def _copied(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of compile arguments, as the ranks get them."""
        copies = {}
        for name, value in arguments.items():
            try:
                copies[name] = load(dump(value, self.getOrDefault("custom_objects")))
            except Exception as error:
                raise ParamError(
                    f"{name}: Keras cannot make equal copies for the ranks "
                    f"({type(error).__name__}: {error}). Give its class a get_config() with all "
                    "arguments of the constructor, or keep each argument in an attribute of its "
                    "name."
                ) from error
        return copies

    def _weights_by_samples(self, settings: CompileSettings) -> bool:
        """Return whether batches are weighted by their sample weights; also check the losses.

        See `KerasTrainSpec`.
        """
        get = self.getOrDefault
        unreduced = without_reduction(settings.loss)
        if unreduced:
            raise ParamError(
                f"loss: expected a loss with one number per batch, found {unreduced[0]!r} with "
                f"reduction={unreduced[0].reduction!r}. Set reduction='sum_over_batch_size', "
                "'mean_with_sample_weight' or 'sum'."
            )
        sums = [e for e in losses(settings.loss) if getattr(e, "reduction", None) == "sum"]
        if sums and get("backward_passes_per_step") > 1:
            raise ParamError(
                "backward_passes_per_step: expected 1 for a loss with reduction='sum', found "
                f"{get('backward_passes_per_step')}. Set reduction='sum_over_batch_size'."
            )
        return weights_by_samples(settings.loss) and bool(
            get("sample_weight_col") is not None or get("class_weight")
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


def _lambda_argument(model: keras.Model) -> str | None:
    """Describe a lambda among the arguments of a model's layers, such as an activation."""
    for layer in all_layers(model):
        for name, value in vars(layer).items():
            if getattr(value, "__name__", None) == "<lambda>":
                return f"{name!r} of the layer {layer.name!r}"
    return None


def _first_reason(error: Exception) -> BaseException:
    """Return the original cause of an error that Keras wraps."""
    if isinstance(error, UnequalCopyError):
        return error
    *_, first = causes(error)
    return first
