"""A torch module that predicts in an executor's Python worker, with as few imports as can be."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_estimators.inference.failures import described, naming_inputs
from hvd_estimators.inference.resources import FRAMEWORKS_CHOICE, Resources
from hvd_estimators.parquet.columns import Array
from hvd_estimators.torch.forward import Forward
from hvd_estimators.torch.outputs import Selected, require_tensors, selection
from hvd_estimators.torch.serialization import load_module, plain_module
from hvd_estimators.torch.tensors import TensorSpec

__all__ = ["ModulePredictor", "TorchPredictor", "input_forms", "transform_spec"]


class ModulePredictor(abc.ABC):
    """Runs forward passes of a module.

    Parameters
    ----------
    document : bytes or path
        What `hvd_estimators.torch.serialization.module_document` returned.
    names : sequence of str
        The feature columns.
    select : callable
        Returns the predictions among what the module returned, see `TensorSpec.select`.
    precision : str
        What the module computes in, see ``inference_precision``.
    resources : Resources
        Threads and GPU.

    Attributes
    ----------
    overlaps : bool
        Whether `begin` returns before the outputs are there, so that the next batch can be begun.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str],
        names: Sequence[str],
        select: Callable[[Any], Selected],
        precision: str,
        resources: Resources,
    ) -> None:
        self._forward = Forward(precision, resources)
        module = plain_module(load_module(document, mapped=True)).eval()
        self._module: Any = self._forward.placed(module)
        self._names, self._select = tuple(names), select
        self.overlaps = self._forward.overlaps

    def __call__(self, arrays: list[Array]) -> list[Array]:
        """Return the outputs, floats, for the feature columns of a batch.

        Raises
        ------
        PredictionError
            If the module fails.
        """
        return self.begin(arrays)()

    def begin(self, arrays: list[Array]) -> Callable[[], list[Array]]:
        """Begin what a call does, and return what waits for the outputs and returns them."""
        given: dict[str, Any] = dict(zip(self._names, arrays, strict=True))
        with contextlib.ExitStack() as stack:
            failing = naming_inputs(lambda: described(given), self._wanted)
            stack.enter_context(failing)
            inputs = self._inputs(arrays)
            given = dict(zip(self._names, inputs, strict=True))
            finish = self._forward.begin(inputs, self._outputs)

        def outputs() -> list[Array]:
            # A GPU's errors come to light when it is waited for.
            with naming_inputs(lambda: described(given), self._wanted):
                return finish()

        return outputs

    @abc.abstractmethod
    def _inputs(self, arrays: list[Array]) -> list[torch.Tensor]:
        """Return a tensor per column, on the CPU."""

    @abc.abstractmethod
    def _call(self, inputs: list[torch.Tensor]) -> Any:
        """Call the module."""

    def _wanted(self) -> str:
        """Return what the module takes, where that is known."""
        return ""

    def _outputs(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        raw = self._call(inputs)
        return require_tensors(self._select(raw), raw)


class TorchPredictor(ModulePredictor):
    """Runs a module's forward pass.

    Parameters
    ----------
    document : bytes or path
        What `hvd_estimators.torch.serialization.module_document` returned.
    spec : TensorSpec
        Which columns the module takes, and how.
    precision : str
        What the module computes in, see ``inference_precision``.
    resources : Resources
        Threads and GPU.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str],
        spec: TensorSpec,
        precision: str = "float32",
        resources: Resources = FRAMEWORKS_CHOICE,
    ) -> None:
        super().__init__(document, spec.feature_cols, spec.select, precision, resources)
        self._spec = spec

    def _inputs(self, arrays: list[Array]) -> list[torch.Tensor]:
        return self._spec.inputs(dict(zip(self._names, arrays, strict=True)))

    def _call(self, inputs: list[torch.Tensor]) -> Any:
        return self._spec.call(self._module, inputs)

    def _wanted(self) -> str:
        return input_forms(self._names, self._spec.input_shapes)


def transform_spec(get: Callable[[str], Any]) -> TensorSpec:
    """Return which columns a module takes, and how, as a model's params say.

    Parameters
    ----------
    get : callable
        The name of a param to its value.
    """
    given = get("input_shapes")
    return TensorSpec(
        feature_cols=tuple(get("feature_columns") or ()),
        label_cols=tuple(get("label_columns") or ()),
        input_shapes=tuple(map(tuple, given)) if given else None,
        dtypes=get("column_dtypes") or {},
        input_form=get("input_form") or "positional",
        outputs=selection(get("outputs")),
        pairs=get("loss_form") != "joint",
    )


def input_forms(names: Sequence[str], shapes: Any) -> str:
    """Return the shapes that are set for a module's inputs as text; empty if there are none."""
    if shapes is None:
        return ""
    rows = (tuple(shape[1:]) for shape in shapes)
    forms = (f"{name} {shape} per row" for name, shape in zip(names, rows, strict=False))
    return f"{', '.join(forms)} (input_shapes)"
