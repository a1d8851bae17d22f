"""Prediction with a torch module in an executor's Python worker.

Runs where predictions are made. On a GPU a batch's inputs are fetched while it computes with the
batch before, and outputs go back the same way.
"""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_estimators.data.arrays import Array
from hvd_estimators.inference.errors import described, naming_inputs
from hvd_estimators.inference.resources import FRAMEWORKS_CHOICE, Resources
from hvd_estimators.torch.serialization import load_module, plain_module
from hvd_estimators.torch.tensors import Selected, TensorSpec, require_tensors, selection
from hvd_estimators.torch.transfer import Copy, cuda_copies

__all__ = [
    "Forward",
    "ModulePredictor",
    "TorchPredictor",
    "autocast",
    "input_forms",
    "limit_threads",
    "transform_spec",
]

Finish = Callable[[], list[Array]]


Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Forward:
    """Runs forward passes where and how it is told.

    Parameters
    ----------
    precision : str
        ``"float32"`` for a module as it is; a half precision for autocast.
    resources : Resources
        Threads and GPU.

    Raises
    ------
    GpuError
        If torch does not see the GPU among others.
    """

    def __init__(self, precision: str, resources: Resources) -> None:
        limit_threads(resources.num_threads)
        gpu = None if resources.gpu is None else resources.among(torch.cuda.device_count())
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self.overlaps = gpu is not None
        self._precision = precision
        # Nothing is noted for autograd in inference mode, which not all modules can do without.
        self._needs_autograd = False
        self._fetch: Copy = cuda_copies(self.device) if self.overlaps else _as_they_are
        self._return = cuda_returns(self.device) if self.overlaps else _arrays

    def placed(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a module on the device; on the CPU its memory stays where it is mapped."""
        return module.to(self.device) if self.overlaps else module

    def begin(
        self,
        inputs: Sequence[torch.Tensor],
        call: Call,
    ) -> Finish:
        """Begin a forward pass, and return what waits for its outputs and returns them.

        Parameters
        ----------
        inputs : sequence of torch.Tensor
            On the CPU.
        call : callable
            The forward pass: tensors on the device to tensors there.
        """
        with contextlib.ExitStack() as stack:
            if self.overlaps:
                # What a module makes on "cuda", too.
                stack.enter_context(torch.cuda.device(self.device))
            fetched = self._fetch(inputs)()
            stack.enter_context(autocast(self.device.type, self._precision))
            with torch.no_grad():
                return self._return(self._called(call, fetched))

    def _called(self, call: Call, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a forward pass's outputs, as floats."""
        if not self._needs_autograd:
            try:
                with torch.inference_mode():
                    return [_as_floats(output) for output in call(inputs)]
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError:
                # Forward passes that take gradients themselves fail there, and CSR weights do.
                pass
        outputs = [_as_floats(output.detach()) for output in call(inputs)]
        self._needs_autograd = True
        return outputs


def autocast(device_type: str, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which torch computes in a half precision, or as it is for float32."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, getattr(torch, precision))


def limit_threads(num_threads: int | None) -> None:
    """Compute with so many threads; None leaves them as they are."""
    if num_threads is None:
        return
    torch.set_num_threads(num_threads)
    # Cannot be set once it has been, or once something ran in such a thread.
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(num_threads)


def cuda_returns(device: torch.device) -> Callable[[Sequence[torch.Tensor]], Finish]:
    """Return what copies tensors of a GPU into page-locked memory, in a stream of its own."""
    stream: Any = torch.cuda.Stream(device)

    def begin(tensors: Sequence[torch.Tensor]) -> Finish:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copies = []
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(copy.copy_(tensor, non_blocking=True))
                # Its memory is not to be used again before it has been read here.
                tensor.record_stream(stream)
            copied = stream.record_event()

        def finish() -> list[Array]:
            copied.synchronize()
            return [copy.numpy() for copy in copies]

        return finish

    return begin


def _as_they_are(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    return lambda: list(tensors)


def _arrays(tensors: Sequence[torch.Tensor]) -> Finish:
    arrays = [tensor.numpy() for tensor in tensors]
    return lambda: arrays


def _as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a type of NumPy's that holds the same numbers."""
    if tensor.dtype in (torch.float32, torch.float64):
        # What was not made by this forward pass (an input, a buffer) may change with the next one.
        return tensor if tensor.is_inference() else tensor.clone()
    return tensor.float() if tensor.dtype.is_floating_point else tensor.double()


class ModulePredictor(abc.ABC):
    """Runs forward passes of a module.

    Parameters
    ----------
    document : bytes or path
        What `hvd_estimators.torch.serialization.module_payload` returned.
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
        What `hvd_estimators.torch.serialization.module_payload` returned.
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
