"""`KerasModel`: predicts with a trained Keras model."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import keras
import tensorflow as tf

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.inference.shared import as_bytes
from hvd_estimators.inference.udf import Document
from hvd_estimators.keras.backend import require_tensorflow
from hvd_estimators.keras.devices import limit_threads
from hvd_estimators.keras.files import save_plainly
from hvd_estimators.keras.inputs import input_structure, text_columns
from hvd_estimators.keras.losses import has_loss, has_own_step
from hvd_estimators.keras.outputs import Outputs
from hvd_estimators.keras.serialization import dump, dump_model, load_model
from hvd_estimators.keras.tensors import alike
from hvd_estimators.keras.trial_calls import call_on_zeros
from hvd_estimators.model import HorovodModel, Predictor
from hvd_estimators.params import declare
from hvd_estimators.parquet.columns import Array

__all__ = ["KerasModel"]


class KerasModel(HorovodModel):
    """A fitted Keras model as a Spark ML Transformer.

    `transform` adds one column per output: a double for a number per row, an ML vector for a
    one-dimensional output, nested arrays of doubles for a higher one. It runs on the driver and
    is lazy; the forward passes run in Arrow batches on the executors, on the CPU.

    Columns are taken as the training's ``transformation_fn`` leaves them; with
    ``apply_transformation`` they are transformed first, as in training.

    ``getModel()`` is a plain Keras model, compiled with the plain optimizer and the learning rate
    of one rank. A saved `KerasModel` holds it as ``model.keras`` too, for use without this package
    (as ``model.weights.h5`` where its classes have no ``get_config()``).
    """

    history = declare("What was measured: name to a list of values by epoch, as Keras's History.")
    custom_objects = declare("Name to custom class or function of the model.", default={})
    _input_keys = declare(
        "Keys of the feature columns in the dict that the model is called with. Default: what the "
        "model tells."
    )
    _floatx = declare("Keras's float type while it was trained.", default="float32")

    def _get_floatx(self) -> str:
        """Return ``_floatx``; as the models of ``horovod.spark`` do."""
        floatx: str = self.getOrDefault("_floatx")
        return floatx

    def _make_predictor(self) -> tuple[bytes, Any]:
        require_tensorflow()
        model = self.getOrDefault("model")
        if model is None:
            raise ParamError("model is not set. Set model.")
        columns = self.getOrDefault("feature_columns") or []
        labels = self.getOrDefault("label_columns") or []
        structure, floatx = self._inputs(), self.getOrDefault("_floatx")
        compares = _compares(model)

        def load(document: Document) -> Predictor:
            return _KerasPredictor(document, structure, columns, labels, floatx, compares)

        return dump_model(model, self.getOrDefault("custom_objects")), load

    def _output_shapes(self) -> list[tuple[int, ...]]:
        known = self.getOrDefault("output_shapes")
        if known is not None:
            return [tuple(shape) for shape in known]
        model = self.getOrDefault("model")
        if any(field.shape is None for field in keras.tree.flatten(self._inputs())):
            raise ParamError(
                "output_shapes is not known for a model that was not fitted and does not tell the "
                "shapes of its inputs. Set output_shapes (the shape of one row of each output)."
            )
        outputs = call_on_zeros(model, self._inputs())
        labels = self.getOrDefault("label_columns") or []
        found = _of_labels(model, outputs, labels, _compares(model))
        return [tuple(output.shape[1:]) for output in found]

    def _inputs(self) -> Any:
        columns = self.getOrDefault("feature_columns") or []
        keys = self.getOrDefault("_input_keys")
        return input_structure(self.getOrDefault("model"), columns, keys)

    def _text_features(self) -> tuple[str, ...]:
        return tuple(text_columns(self._inputs()))

    def _dump_param(self, name: str, value: Any) -> bytes:
        return dump(value, self.getOrDefault("custom_objects"))

    def _extra_files(self) -> dict[str, bytes]:
        """Return the model as a plain file, for use without this package.

        It is ``model.keras``, or ``model.weights.h5`` where the model has no config.
        """
        with tempfile.TemporaryDirectory() as directory:
            path = save_plainly(self.getOrDefault("model"), directory)
            with open(path, "rb") as file:
                return {os.path.basename(path): file.read()}


class _KerasPredictor:
    """Runs a model's forward pass; lives in an executor's Python worker."""

    def __init__(
        self,
        document: Document,
        structure: Any,
        columns: list[str],
        labels: list[str],
        floatx: str,
        compares: bool,
    ) -> None:
        limit_threads()
        tf.config.set_visible_devices([], "GPU")
        keras.config.set_floatx(floatx)
        self._model = load_model(as_bytes(document))
        self._structure = structure
        self._columns = columns
        self._labels = labels
        self._compares = compares

    def __call__(self, arrays: list[Array]) -> list[Array]:
        columns = dict(zip(self._columns, arrays, strict=True))
        x = alike(keras.tree.map_structure(lambda f: f.array(columns[f.column]), self._structure))
        outputs = self._model.predict_on_batch(x)
        return _of_labels(self._model, outputs, self._labels, self._compares)


def _compares(model: keras.Model) -> bool:
    """Return whether labels had to pair with outputs while a model was trained."""
    return not (has_own_step(model) or (model.compiled and not has_loss(model)))


def _of_labels(model: keras.Model, outputs: Any, labels: list[str], compares: bool) -> list[Any]:
    """Return the outputs of the labels, in their order; all of them where they are not paired."""
    flat = keras.tree.flatten(outputs)
    if not labels:
        return list(flat)
    try:
        return Outputs.of(model, outputs, labels).select(flat, labels)
    except ShapeError:
        if compares:
            raise
        return list(flat)
