"""Predict with a Keras model in an executor's Python worker, or without Spark."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.exceptions import ShapeError
from hvd_estimators.inference.batch import DEFAULT_RESOURCES, FrameworkPredictor, Resources
from hvd_estimators.keras.backend import CPU, all_layers, config, configure, on_tensorflow
from hvd_estimators.keras.losses import pairs_labels
from hvd_estimators.keras.outputs import Outputs, symbolic
from hvd_estimators.keras.serialization import load, load_model
from hvd_estimators.keras.tensors import alike, input_structure, text_columns
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.loading.collate_fn import BatchNames, require
from hvd_estimators.saving.saved import Saved


def choose_device(resources: Resources) -> str:
    """Configure the backend's threads and GPUs, and return the device to predict on.

    Settings that TensorFlow cannot change after its initialization keep their values.

    Parameters
    ----------
    resources : Resources
        Threads and GPU. Without a GPU, all GPUs are hidden from TensorFlow. With one, the process's
        GPUs stay visible, since later tasks may use other GPUs. TensorFlow then allocates only the
        memory that it needs.

    Raises
    ------
    GpuError
        If TensorFlow sees GPUs, but not this one.
    """
    threads = resources.num_threads
    if not on_tensorflow():
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        visible = torch.cuda.device_count() if resources.gpu is not None else 0
        gpu = resources.among(visible)
        return CPU if gpu is None else f"gpu:{gpu}"
    import tensorflow as tf

    if threads is not None:
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    gpus = tf.config.list_physical_devices("GPU") if resources.gpu is not None else []
    gpu = resources.among(len(gpus))
    with contextlib.suppress(RuntimeError):
        if gpu is None:
            tf.config.set_visible_devices([], "GPU")
        for device in gpus:
            tf.config.experimental.set_memory_growth(device, True)
    return CPU if gpu is None else f"gpu:{gpu}"


def reduce_precision(model: keras.Model, precision: str) -> None:
    """Make a model's layers compute in half precision, as with Keras's mixed policies.

    Variables keep their type. Layers that compute in a type other than float32 keep their policy.

    Parameters
    ----------
    model : keras.Model
        Changed in place. Must not have been called yet.
    precision : str
        ``"bfloat16"`` or ``"float16"``; ``"float32"`` has no effect.
    """
    if precision == "float32":
        return
    policy = keras.DTypePolicy(f"mixed_{precision}")
    for layer in _computing(model):
        own = layer.dtype_policy
        if own.quantization_mode is None and own.compute_dtype == own.variable_dtype == "float32":
            layer.dtype_policy = policy


def _computing(layer: keras.Layer) -> list[keras.Layer]:
    """Return the layers that compute, except functional models, whose inputs must stay exact."""
    if isinstance(layer, (keras.layers.InputLayer, keras.layers.Normalization)):
        return []
    if isinstance(layer, keras.Model) and symbolic(layer, "input") is not None:
        return [computing for part in layer.layers for computing in _computing(part)]
    return all_layers(layer)


class KerasPredictor(FrameworkPredictor):
    """Predictor that runs a Keras model's forward pass.

    Parameters
    ----------
    document : bytes, path or keras.Model
        Result of `hvd_estimators.keras.serialization.model_payload`; or a model, which this object
        then owns.
    resources : Resources
        Threads and GPU.
    structure : Field, or nested structure of Field
        The model's inputs.
    columns, labels : list of str
        Names of the inputs, and label columns.
    settings : dict
        Keras's settings while the model was trained.
    compares : bool
        Whether training required that labels pair with outputs.
    selection : sequence of (int or str) or None
        Positions or names of the outputs that are predictions; None for the labels' outputs.
    precision : str
        Type that the model computes in, see ``inference_precision``.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str] | keras.Model,
        resources: Resources = DEFAULT_RESOURCES,
        *,
        structure: Any,
        columns: Sequence[str],
        labels: list[str],
        settings: Mapping[str, Any],
        compares: bool,
        selection: Sequence[int | str] | None,
        precision: str,
    ) -> None:
        super().__init__(columns)
        self._device = choose_device(resources)
        self.overlaps = self._device != CPU
        self._settings = settings
        configure(settings)
        if isinstance(document, keras.Model):
            self._model = document
        else:
            with keras.device(self._device):
                self._model = load_model(document)
        reduce_precision(self._model, precision)
        self._structure = structure
        self._fields = {field.column: field for field in keras.tree.flatten(structure)}
        self._labels, self._compares, self._selection = labels, compares, selection

    def input_dtype(self, name: str, stored: str) -> str:
        """Return the type of the model's input."""
        return str(self._fields[name].dtype_of(np.dtype(stored)))

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        if any(isinstance(each, CollatedBatch) for each in inputs):
            return {}
        return super()._named(inputs)

    def _inputs(self, arrays: list[Array]) -> list[Any]:
        if isinstance(batch := arrays[-1], CollatedBatch):
            given = BatchNames(self._columns, tuple(self._labels)).inputs(batch)
            arrays = [np.asarray(each) for each in require(given, self._columns, "input").values()]
        with keras.device(self._device):
            return [
                self._fields[name].array(array)
                for name, array in zip(self._columns, arrays, strict=True)
            ]

    def _start(self, inputs: list[Any]) -> Callable[[], list[Array]]:
        given = dict(zip(self._columns, inputs, strict=True))
        # Another predictor may have been loaded since.
        configure(self._settings)
        with keras.device(self._device):
            x = alike(keras.tree.map_structure(lambda f: given[f.column], self._structure))
            if self.overlaps:
                # As predict_on_batch, without waiting for the GPU.
                self._model.make_predict_function()
                outputs = self._model.predict_function([(x,)])
            else:
                # Not a model's own, as in training: keras-hub's prepares the columns once more.
                outputs = keras.Model.predict_on_batch(self._model, x)

        def finish() -> list[Array]:
            computed = outputs
            if self.overlaps:
                computed = keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)
            chosen = of_labels(self._model, computed, self._labels, self._compares, self._selection)
            return [_as_numbers(output) for output in chosen]

        return finish

    def _expected_inputs(self) -> str:
        """Describe the inputs that the model declares."""
        shaped = [field for field in self._fields.values() if field.shape is not None]
        forms = (f"{f.column} {f.shape} {f.dtype or ''}".rstrip() for f in shaped)
        return f"{', '.join(forms)} per row" if shaped else ""


def inputs_of(model: keras.Model, get: Callable[[str], Any]) -> Any:
    """Return a fitted model's inputs as `input_structure` does, given its params.

    Parameters
    ----------
    model : keras.Model
        The model.
    get : callable
        Function from the name of a param to its value.
    """
    return input_structure(model, _input_names(get), get("_input_keys"))


def _input_names(get: Callable[[str], Any]) -> Sequence[str]:
    """Return the names of a model's inputs: names in its batches, or the feature columns."""
    names: Sequence[str] | None = get("_batch_names")
    return InputColumns.of(get("feature_columns") or []).names if names is None else names


def config_of(get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the settings that Keras had when a model was trained; else its present ones."""
    given = get("_keras_config") or {}
    return {**config(), **given, "floatx": get("_floatx") or "float32"}


def predictor_settings(model: keras.Model, get: Callable[[str], Any]) -> dict[str, Any]:
    """Return arguments of `KerasPredictor`; see `inputs_of` and `pairs_labels`."""
    return {
        "structure": inputs_of(model, get),
        "columns": _input_names(get),
        "labels": list(get("label_columns") or []),
        "settings": config_of(get),
        "compares": pairs_labels(model),
        "selection": get("outputs"),
        "precision": get("inference_precision") or "float32",
    }


def of_labels(
    model: keras.Model,
    outputs: Any,
    labels: list[str],
    compares: bool,
    selection: Sequence[int | str] | None = None,
) -> list[Any]:
    """Return the selected outputs, else the labels' outputs, else all outputs.

    If the labels do not pair with the outputs, all outputs are returned or, if ``compares`` is set,
    an error is raised.
    """
    flat = keras.tree.flatten(outputs)
    if selection is not None:
        return Outputs.of(model, outputs, (), selection).select(flat)
    if not labels:
        return list(flat)
    try:
        return Outputs.of(model, outputs, labels).select(flat)
    except ShapeError:
        if compares:
            raise
        return list(flat)


def _as_numbers(output: Any) -> Array:
    """Convert an output to a type of NumPy that holds the same numbers."""
    array = np.asarray(output)
    if array.dtype in (np.float32, np.float64) or array.dtype.kind in "biu":
        return array
    if array.dtype.kind in "OSU":
        raise ShapeError("The model returns text. transform() supports numbers only.")
    # TensorFlow's own half-precision types, such as bfloat16, are not floating types of NumPy.
    return array.astype(np.float32 if array.dtype.itemsize == 2 else np.float64)


def load_saved(saved: Saved, resources: Resources) -> tuple[KerasPredictor, Sequence[str]]:
    """Return the predictor of a saved model, and its features that may be text."""
    configure(config_of(saved.get))
    with keras.device(choose_device(resources)):
        model = load(saved.read("model"))
    # Its state takes twice the memory of the weights.
    model.optimizer = None
    settings = predictor_settings(model, saved.get)
    predictor = KerasPredictor(model, resources, **settings)
    return predictor, list(text_columns(settings["structure"]))
