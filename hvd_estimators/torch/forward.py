"""Forward passes for predictions: on the task's GPU or cores, and in which precision.

Runs where predictions are made. On a GPU a batch's inputs are fetched while it computes with the
batch before, and outputs go back the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_estimators.inference.resources import Resources
from hvd_estimators.parquet.columns import Array
from hvd_estimators.torch.copies import Copy, cuda_copies

__all__ = ["Forward", "autocast", "limit_threads"]

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
