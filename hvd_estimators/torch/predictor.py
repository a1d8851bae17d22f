"""Prediction with a torch module, in an executor's Python worker or without Spark.

On a GPU, a batch's inputs are copied to the device while the GPU computes the previous batch.
Outputs are copied back in the same way. Runs in the process that predicts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_estimators.data.arrays import Array
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.exceptions import ShapeError
from hvd_estimators.inference.batch import DEFAULT_RESOURCES, FrameworkPredictor, Resources
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.saving.saved import Saved
from hvd_estimators.store import Store
from hvd_estimators.torch.optimizer_step import autocast
from hvd_estimators.torch.serialization import load_module, plain_module
from hvd_estimators.torch.stored_weights import complete
from hvd_estimators.torch.tensors import (
    NO_COMPLEX_COLUMN,
    Copy,
    Inputs,
    TensorSpec,
    cuda_copies,
    require_tensors,
)

Finish = Callable[[], list[Array]]


Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Forward:
    """Forward passes with a given precision, number of threads, and device.

    Parameters
    ----------
    precision : str
        ``"float32"`` for the module's own precision; a half precision for autocast.
    resources : Resources
        Threads and GPU.

    Raises
    ------
    GpuError
        If torch sees other GPUs but not this one.
    """

    def __init__(self, precision: str, resources: Resources) -> None:
        limit_threads(resources.num_threads)
        gpu = None if resources.gpu is None else resources.among(torch.cuda.device_count())
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self.overlaps = gpu is not None
        self._precision = precision
        # Inference mode records nothing for autograd, and not all modules work without autograd.
        self._needs_autograd = False
        self._fetch: Copy = cuda_copies(self.device) if self.overlaps else _unchanged
        self._return = cuda_returns(self.device) if self.overlaps else _arrays

    def placed(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a module on the device; on the CPU, its memory stays mapped."""
        return module.to(self.device) if self.overlaps else module

    def begin(self, inputs: Sequence[torch.Tensor], call: Call) -> Finish:
        """Start a forward pass, and return a function that waits for the outputs and returns them.

        Parameters
        ----------
        inputs : sequence of torch.Tensor
            Tensors on the CPU.
        call : callable
            The forward pass: maps tensors on the device to tensors on the device.
        """
        with contextlib.ExitStack() as stack:
            if self.overlaps:
                # Covers tensors that a module creates on "cuda".
                stack.enter_context(torch.cuda.device(self.device))
            fetched = self._fetch(inputs)()
            stack.enter_context(autocast(self._precision, self.device.type))
            with torch.no_grad():
                return self._return(self._called(call, fetched))

    def _called(self, call: Call, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run a forward pass, and return its outputs as numbers that NumPy has."""
        if not self._needs_autograd:
            try:
                with torch.inference_mode():
                    return [_as_numbers(output) for output in call(inputs)]
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError:
                # Inference mode fails for forward passes that compute gradients, and for CSR
                # weights.
                pass
        outputs = [_as_numbers(output.detach()) for output in call(inputs)]
        self._needs_autograd = True
        return outputs


def limit_threads(num_threads: int | None) -> None:
    """Set torch's number of threads; None changes nothing."""
    if num_threads is None:
        return
    torch.set_num_threads(num_threads)
    # Fails if the number was set before, or if such a thread has run already.
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(num_threads)


def cuda_returns(device: torch.device) -> Callable[[Sequence[torch.Tensor]], Finish]:
    """Return a function that copies GPU tensors to page-locked memory in a separate stream."""
    stream: Any = torch.cuda.Stream(device)

    def begin(tensors: Sequence[torch.Tensor]) -> Finish:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copies = []
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(copy.copy_(tensor, non_blocking=True))
                # Prevents reuse of the memory before this stream has read it.
                tensor.record_stream(stream)
            copy_done = stream.record_event()

        def finish() -> list[Array]:
            copy_done.synchronize()
            return [copy.numpy() for copy in copies]

        return finish

    return begin


def _unchanged(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    return lambda: list(tensors)


def _arrays(tensors: Sequence[torch.Tensor]) -> Finish:
    arrays = [tensor.numpy() for tensor in tensors]
    return lambda: arrays


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same numbers, half floats as float32.

    Raises
    ------
    ShapeError
        If the numbers are complex: a conversion would drop their imaginary parts.
    """
    if tensor.is_complex():
        raise ShapeError(f"outputs: {NO_COMPLEX_COLUMN}")
    if not tensor.is_floating_point() or tensor.dtype in (torch.float32, torch.float64):
        # The next forward pass may change a tensor that this pass did not create (an input, a
        # buffer).
        return tensor if tensor.is_inference() else tensor.clone()
    return tensor.float()


class TorchPredictor(FrameworkPredictor):
    """Predictor that runs a torch module's forward pass.

    Parameters
    ----------
    document : bytes or path
        Result of `hvd_estimators.torch.serialization.module_payload`.
    spec : TensorSpec
        The module's columns, and their conversion to tensors.
    precision : str
        Precision of the computation, see ``inference_precision``.
    resources : Resources
        Threads and GPU.
    weights_in : tuple of (Store, str), optional
        Store and folder of a saved model's weights, if the document has none.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str],
        spec: TensorSpec,
        precision: str = "float32",
        resources: Resources = DEFAULT_RESOURCES,
        weights_in: tuple[Store, str] | None = None,
    ) -> None:
        super().__init__(spec.feature_cols)
        self._forward = Forward(precision, resources)
        module = complete(plain_module(load_module(document, mapped=True)), weights_in)
        self._module: Any = self._forward.placed(module.eval())
        self._spec = spec
        self.overlaps = self._forward.overlaps

    def input_dtype(self, name: str, stored: str) -> str:
        """Return the type that the params set, float32 by default."""
        return self._spec.dtype_name(name)

    def _inputs(self, arrays: list[Array]) -> list[torch.Tensor]:
        """Return one tensor per column, or the inputs of a `CollatedBatch`, on the CPU."""
        (*_, first) = arrays
        if isinstance(first, CollatedBatch):
            return self._spec.inputs(first)
        return self._spec.inputs(dict(zip(self._columns, arrays, strict=True)))

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        if any(isinstance(each, CollatedBatch) for each in inputs):
            return {}
        return self._spec.named(inputs)

    def _start(self, inputs: list[torch.Tensor]) -> Finish:
        names = self._spec.names(inputs)
        return self._forward.begin(
            inputs, lambda tensors: self._outputs(Inputs(dict(zip(names, tensors, strict=True))))
        )

    def _call(self, inputs: list[torch.Tensor]) -> Any:
        """Call the module."""
        return self._spec.call(self._module, inputs)

    def _outputs(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        raw = self._call(inputs)
        return require_tensors(self._spec.select(raw), raw)

    def _expected_inputs(self) -> str:
        """Return the configured shapes of the inputs as text; empty if no shapes are set."""
        shapes = self._spec.input_shapes
        if shapes is None:
            return ""
        forms = (
            f"{name} {tuple(shape[1:])} per row"
            for name, shape in zip(self._columns, shapes, strict=False)
        )
        return f"{', '.join(forms)} (input_shapes)"


def transform_spec(get: Callable[[str], Any]) -> TensorSpec:
    """Return a module's columns and their conversion to tensors, from a model's params.

    Parameters
    ----------
    get : callable
        Maps the name of a param to its value.
    """
    given = get("input_shapes")
    return TensorSpec(
        feature_cols=InputColumns.of(get("feature_columns")).names,
        label_cols=tuple(get("label_columns") or ()),
        input_shapes=tuple(map(tuple, given)) if given else None,
        dtypes=get("column_dtypes") or {},
        input_form=get("input_form") or "positional",
        outputs=get("outputs"),
        pairs=get("loss_form") != "joint",
        keeps_dtypes=get("collate_fn") is not None,
    )


def load_saved(saved: Saved, resources: Resources) -> tuple[TorchPredictor, Sequence[str]]:
    """Return the predictor of a saved model, and its features that may be text."""
    precision = saved.get("inference_precision") or "float32"
    spec = transform_spec(saved.get)
    given = saved.file("model"), spec, precision, resources
    return TorchPredictor(*given, weights_in=(saved.store, saved.params_folder)), ()
