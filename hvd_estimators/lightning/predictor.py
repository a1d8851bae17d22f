"""LightningModule predictions in an executor's Python worker, or without Spark."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hvd_estimators.data.arrays import Array
from hvd_estimators.inference.batch import DEFAULT_RESOURCES, Resources
from hvd_estimators.inference.errors import described, naming_inputs
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.saving.saved import Saved
from hvd_estimators.store import Store
from hvd_estimators.torch.optimizer_step import autocast
from hvd_estimators.torch.predictor import TorchPredictor, limit_threads, transform_spec
from hvd_estimators.torch.serialization import load_module
from hvd_estimators.torch.stored_weights import complete
from hvd_estimators.torch.tensors import (
    Inputs,
    TensorSpec,
    call_with_leading,
    from_numpy,
    leaves,
    require_tensors,
    select_outputs,
    with_tensors,
)

RowFunction = Callable[[torch.nn.Module, Any], Any]
"""Maps a module and a row (a ``pyspark.sql.Row``) to an output or a list of outputs."""


def floating_dtype(module: torch.nn.Module) -> torch.dtype:
    """Return the dtype of a module's floating inputs: the dtype of its parameters."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def forward_inputs(
    module: torch.nn.Module, arrays: list[Array], spec: TensorSpec
) -> list[torch.Tensor]:
    """Return the inputs for a module's ``forward``.

    Parameters
    ----------
    module : torch.nn.Module
        The module; its floating parameters determine the dtype of floating inputs.
    arrays : list of array
        The feature columns, rows first.
    spec : TensorSpec
        The columns, and the shapes and dtypes that the user has set.
    """
    own = floating_dtype(module)
    inputs = []
    for name, array in zip(spec.feature_cols, arrays, strict=True):
        tensor = from_numpy(array)
        if name in spec.dtypes:
            tensor = tensor.to(spec.dtype(name))
        elif tensor.is_floating_point():
            tensor = tensor.to(own)
        inputs.append(tensor)
    if spec.input_shapes is None:
        return inputs
    shapes = zip(inputs, spec.input_shapes, strict=True)
    return [tensor.reshape(len(tensor), *shape[1:]) for tensor, shape in shapes]


def collated_inputs(
    module: torch.nn.Module, batch: CollatedBatch, spec: TensorSpec
) -> list[torch.Tensor]:
    """Return the inputs of a collated batch for a module's ``forward``; see `forward_inputs`."""
    named = spec.named(replace(spec, keeps_dtypes=True).inputs(batch))
    if not spec.keeps_dtypes:
        own = floating_dtype(module)
        for name, tensor in named.items():
            if name not in spec.dtypes and tensor.is_floating_point():
                named[name] = tensor.to(own)
    return Inputs(named)


class _Leaves(list[torch.Tensor]):
    """Tensors of a batch for ``predict_step``, which gets the batch itself."""

    def __init__(self, batch: CollatedBatch) -> None:
        super().__init__(leaves(batch))
        self.batch = batch


class LightningPredictor(TorchPredictor):
    """Run a module's forward pass, or its ``predict_step``.

    Parameters
    ----------
    document : bytes or path
        The return value of `hvd_estimators.torch.serialization.module_payload`.
    by_step : bool
        Whether to call ``predict_step``, with a dict of column to tensor.
    spec : TensorSpec
        The module's input columns and their form, and the outputs that are predictions.
    precision : str
        The module's compute precision, see ``inference_precision``.
    resources : Resources
        Threads and GPU.
    weights_in : tuple of (Store, str), optional
        See `TorchPredictor`.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str],
        by_step: bool,
        spec: TensorSpec,
        precision: str = "float32",
        resources: Resources = DEFAULT_RESOURCES,
        weights_in: tuple[Store, str] | None = None,
    ) -> None:
        super().__init__(document, spec, precision, resources, weights_in)
        self._by_step = by_step

    def input_dtype(self, name: str, stored: str) -> str:
        """Return the type that the params set; else the module's, for floats."""
        own = floating_dtype(self._module) if stored.startswith("float") else stored
        return str(self._spec.dtypes.get(name, str(own).removeprefix("torch.")))

    def _inputs(self, arrays: list[Any]) -> list[torch.Tensor]:
        (*_, first) = arrays
        if isinstance(first, CollatedBatch):
            if self._by_step:
                return _Leaves(first)
            return collated_inputs(self._module, first, self._spec)
        return forward_inputs(self._module, arrays, self._spec)

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        if isinstance(inputs, _Leaves):
            return {str(number): each for number, each in enumerate(inputs)}
        return super()._named(inputs)

    def _start(self, inputs: list[torch.Tensor]) -> Callable[[], list[Array]]:
        if not isinstance(inputs, _Leaves):
            return super()._start(inputs)

        def call(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            batch = with_tensors(inputs.batch, tensors).value
            raw = call_with_leading(self._module.predict_step, batch, 0)
            return require_tensors(self._spec.select(raw), raw)

        return self._forward.begin(inputs, call)

    def _call(self, inputs: list[torch.Tensor]) -> Any:
        if self._by_step:
            batch = self._spec.named(inputs)
            return call_with_leading(self._module.predict_step, batch, 0)
        return super()._call(inputs)


class RowPredictor:
    """Call a prediction function row by row, on the CPU.

    Parameters
    ----------
    document : bytes or path
        The return value of `hvd_estimators.torch.serialization.module_payload`.
    function : callable
        Maps a module and a row to the row's prediction.
    features : list of str
        Names of the row's values.
    precision : str
        The module's compute precision, see ``inference_precision``.
    resources : Resources
        Threads; functions create their tensors on the CPU.
    weights_in : tuple of (Store, str), optional
        See `TorchPredictor`.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str],
        function: RowFunction,
        features: list[str],
        precision: str = "float32",
        resources: Resources = DEFAULT_RESOURCES,
        weights_in: tuple[Store, str] | None = None,
    ) -> None:
        limit_threads(resources.num_threads)
        self._module = complete(load_module(document, mapped=True), weights_in).eval()
        self._function = function
        self._features = features
        self._precision = precision

    def __call__(self, arrays: list[Array]) -> list[Array]:
        """Return the outputs for the feature columns of a batch.

        Raises
        ------
        PredictionError
            If the function fails.
        """
        from pyspark.sql import Row

        predicted = []
        for values in zip(*arrays, strict=True):
            named = dict(zip(self._features, values, strict=True))
            with (
                naming_inputs(functools.partial(_described_row, named)),
                torch.no_grad(),
                autocast(self._precision, "cpu"),
            ):
                row = Row(**named)
                predicted.append(_outputs(self._function(self._module, row)))
        return [np.stack(column) for column in zip(*predicted, strict=True)]


def _described_row(row: dict[str, Any]) -> str:
    return f"one row, {described({name: np.asarray(value) for name, value in row.items()})}"


def _outputs(predicted: Any) -> list[Array]:
    """Return the outputs for one row without the row dimension."""
    tensors = [torch.as_tensor(p) for p in select_outputs(predicted)]
    arrays = [np.asarray(t.double() if t.is_floating_point() else t) for t in tensors]
    return [array[0] if array.ndim and len(array) == 1 else array for array in arrays]


def load_saved(saved: Saved, resources: Resources) -> tuple[LightningPredictor, Sequence[str]]:
    """Return the predictor of a saved model, and its features that may be text."""
    get = saved.get
    precision = get("inference_precision") or "float32"
    by_step = bool(get("use_predict_step"))
    given = saved.file("model"), by_step, transform_spec(get), precision, resources
    return LightningPredictor(*given, weights_in=(saved.store, saved.params_folder)), ()
