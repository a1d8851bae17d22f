"""A torch module that predicts in an executor's Python worker, with as few imports as can be."""

from __future__ import annotations

import os

import torch

from hvd_estimators.parquet.columns import Array
from hvd_estimators.torch.outputs import as_list
from hvd_estimators.torch.serialization import load_module
from hvd_estimators.torch.tensors import TensorSpec

__all__ = ["TorchPredictor"]


class TorchPredictor:
    """Runs a module's forward pass.

    Parameters
    ----------
    document : bytes or path
        What `hvd_estimators.torch.serialization.module_document` returned.
    spec : TensorSpec
        Which columns the module takes, and how.
    """

    def __init__(self, document: bytes | os.PathLike[str], spec: TensorSpec) -> None:
        self._module = load_module(document, mapped=True).eval()
        self._spec = spec

    def __call__(self, arrays: list[Array]) -> list[Array]:
        """Return the outputs as float64, for the feature columns of a batch."""
        columns = dict(zip(self._spec.feature_cols, arrays, strict=True))
        with torch.inference_mode():
            raw = self._spec.call(self._module, self._spec.inputs(columns))
            outputs = as_list(raw, self._spec.label_cols)
        return [output.double().numpy() for output in outputs]
