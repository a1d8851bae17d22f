"""`KerasModel`: predict with a trained Keras model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import keras

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.keras.evaluation import combine, load_evaluator
from hvd_estimators.keras.losses import pairs_labels
from hvd_estimators.keras.outputs import symbolic
from hvd_estimators.keras.predictor import (
    KerasPredictor,
    config_of,
    inputs_of,
    of_labels,
    predictor_settings,
)
from hvd_estimators.keras.serialization import compile_arguments, dump, model_payload
from hvd_estimators.keras.tensors import TensorSpec, text_columns
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import narrowed, param
from hvd_estimators.saving.export import exported, require_packages

if TYPE_CHECKING:
    from hvd_estimators.keras.signatures import KerasModelSignatures
else:
    KerasModelSignatures = HorovodModel


class KerasModel(KerasModelSignatures):
    """A fitted Keras model as a Spark ML Transformer.

    `transform` adds one column per output. The column's type depends on the output: a double for a
    number per row, an ML vector for one dimension, nested arrays of doubles for more. `transform`
    runs on the driver and is lazy. The forward passes run in Arrow batches on the executors, on the
    task's cores or on the GPU that Spark assigns to it.

    `transform` expects columns in the form that the training's ``transformation_fn`` returned. With
    ``apply_transformation``, `transform` first applies the training's transformation to the
    columns.

    ``getModel()`` returns a plain Keras model, compiled with the plain optimizer and the learning
    rate of one rank. A saved `KerasModel` also contains this model as ``model.keras``, for use
    without this package. If the model's classes have no ``get_config()``, the file is
    ``model.weights.h5``.
    """

    model = narrowed(HorovodModel, "model", "keras.Model")
    history = param(
        "Metrics of the training: dict of name to a list of values by epoch, like Keras's History.",
        type="dict[str, list[Any]]",
        fitted=True,
    )
    custom_objects = param(
        "Dict of name to custom class or function of the model.", default={}, type="dict[str, Any]"
    )
    _labels = param("Label columns in the structure of the model's outputs, from training.")
    _input_keys = param(
        "Keys of the feature columns in the dict that the model takes. Default: the keys that "
        "the model defines."
    )
    _batch_names = param(
        "Names of the inputs in batches that collate_fn or padding makes; None without these."
    )
    _floatx = param("Keras's float type during training.", default="float32")
    _keras_config = param("Keras's settings during training. Default: the present ones.")

    def _get_floatx(self) -> str:
        """Return ``_floatx``, like the models of ``horovod.spark``."""
        floatx: str = self.getOrDefault("_floatx")
        return floatx

    def setModel(self, value: Any) -> Self:
        """Set ``model``; if it defines its outputs, they replace the earlier model's."""
        before = [tuple(shape) for shape in self.getOrDefault("output_shapes") or []]
        self._set(model=value)
        if isinstance(value, keras.Model) and symbolic(value, "output") is not None:
            self.clear(self.output_shapes)
            with contextlib.suppress(ShapeError):  # outputs and labels that do not pair yet
                self._set(output_shapes=self._output_shapes())
            if self.getOrDefault("output_shapes") != before:
                self._setDefault(outputs_are=None, predictionCol=None)
        return self

    def export(
        self,
        path: str,
        *,
        format: str = "tf_saved_model",
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Export the model for other programs with Keras's ``export``, for any number of rows.

        The outputs are the model's own: outputs are not cast, and a classifier's columns are not
        included. The export does not include the transformation. Runs on the driver. ONNX needs the
        packages of the extra ``onnx``.

        Parameters
        ----------
        path : str
            Folder of a SavedModel, or file of another format: a local path, or a URL with a
            registered store. A local export appears only when it is complete. Elsewhere
            ``saved_model.pb``, without which the model does not load, is written last.
        format : str
            ``"tf_saved_model"``, ``"onnx"``, or another format that Keras supports.
        overwrite : bool
            Whether to replace an existing export.
        storage_options : mapping, optional
            Passed to fsspec's filesystem.
        **options
            Passed to ``keras.Model.export``, such as ``input_signature``.

        Raises
        ------
        DependencyError
            If a package is not installed.
        ParamError
            If Keras cannot export the model in this format.
        StoreError
            If the path exists already, or cannot be written.
        """
        model = self.getOrDefault("model")
        if model is None:
            raise ParamError("model is not set. Set model.")
        if format == "onnx":
            require_packages("export(format='onnx')", "onnx", "tf2onnx")
        with exported(path, overwrite, storage_options, last="saved_model.pb") as target:
            try:
                model.export(target, format=format, **{"verbose": False, **options})
            except Exception as error:
                raise ParamError(
                    f"model: Keras does not export it as {format!r} ({type(error).__name__}: "
                    f"{error})."
                ) from error

    def _make_predictor(self) -> tuple[bytes | LocalFile, Any]:
        model = self.getOrDefault("model")
        if model is None:
            raise ParamError("model is not set. Set model.")
        document = model_payload(model, self.getOrDefault("custom_objects"))
        settings = predictor_settings(model, self.getOrDefault)
        return document, functools.partial(KerasPredictor, **settings)

    def _make_evaluator(self) -> tuple[bytes | LocalFile, Any, Any]:
        get = self.getOrDefault
        model, custom_objects = get("model"), get("custom_objects")
        if model is None or not model.compiled:
            raise ParamError(
                "model: expected a compiled model, whose loss and metrics evaluate() computes, "
                f"found {model!r}. Compile the model."
            )
        tensors = TensorSpec(self._inputs(), self._label_structure(), get("sample_weight_col"))
        arguments = compile_arguments(model)
        if arguments is not None:
            arguments["jit_compile"] = False
        compiled, document = dump(arguments, custom_objects), model_payload(model, custom_objects)

        settings: dict[str, Any] = {
            "compiled": compiled,
            "tensors": tensors,
            "settings": config_of(get),
        }
        return (
            document,
            functools.partial(load_evaluator, **settings),
            functools.partial(combine, document, **settings),
        )

    def _label_structure(self) -> Any:
        """Return the label columns in the structure of the model's outputs."""
        structure, labels = map(self.getOrDefault, ("_labels", "label_columns"))
        if structure is None and labels:
            raise ParamError(
                "model: expected a fitted model. Call evaluate() of the Keras model, getModel()."
            )
        return () if structure is None else structure

    def _output_shapes(self) -> list[tuple[int, ...]]:
        shapes = self.getOrDefault("output_shapes")
        if shapes is not None:
            return [tuple(shape) for shape in shapes]
        model = self.getOrDefault("model")
        if type(model).call is keras.Model.call:
            name = type(model).__name__
            raise ParamError(
                f"model: {name} has no call(), so that it trains and does not predict. Give the "
                "class a call() before fit(), or setModel() to a part that predicts, such as "
                "getModel().generator."
            )
        outputs = symbolic(model, "output")
        if outputs is None:
            raise ParamError(
                "output_shapes is not known for a model that was not fitted and does not define "
                "its outputs. Set output_shapes (the shape of one row of each output)."
            )
        labels = self.getOrDefault("label_columns") or []
        selection = self.getOrDefault("outputs")
        selected = of_labels(model, outputs, labels, pairs_labels(model), selection)
        return [tuple(output.shape[1:]) for output in selected]

    def _inputs(self) -> Any:
        return inputs_of(self.getOrDefault("model"), self.getOrDefault)

    def _text_features(self) -> tuple[str, ...]:
        return tuple(text_columns(self._inputs()))

    def _dump_param(self, name: str, value: Any) -> bytes:
        return dump(value, self.getOrDefault("custom_objects"))

    def _extra_files(self) -> dict[str, LocalFile]:
        """Return the model as a plain file, for use without this package.

        The file is ``model.keras``, or ``model.weights.h5`` if the model has no config.
        """
        local = LocalFile()
        path = Path(local.path).with_name("model.keras")
        try:
            self.getOrDefault("model").save(path)
        except (NotImplementedError, TypeError, ValueError):
            path = path.with_name("model.weights.h5")
            self.getOrDefault("model").save_weights(path)
        path.replace(local.path)
        return {path.name: local}
