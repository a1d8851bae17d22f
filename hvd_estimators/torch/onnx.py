"""ONNX export of modules with torch's exporter. Runs on the driver."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.saving.export import exported, require_packages

Call = Callable[[torch.nn.Module, "list[torch.Tensor]"], Any]
"""Function that calls a module with one input per feature column and returns the predictions."""

# A single ONNX file cannot hold more.
_MOST_BYTES = 2**31 - 2**26


class _Exported(torch.nn.Module):
    """Module that takes one tensor per feature column and returns one tensor per output."""

    def __init__(self, module: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._call(self.module, list(inputs)))


def export_onnx(
    module: torch.nn.Module,
    call: Call,
    inputs: Mapping[str, torch.Tensor],
    outputs: Sequence[str],
    path: str,
    overwrite: bool,
    storage_options: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> None:
    """Export a module as ONNX, for any number of rows.

    Parameters
    ----------
    module : torch.nn.Module
        The module; its training or evaluation mode is restored afterwards.
    call : callable
        Calls the module with its inputs.
    inputs : mapping of str to tensor
        Input names to examples of two rows.
    outputs : sequence of str
        Output names.
    path, overwrite, storage_options
        See `exported`.
    options : mapping
        Further arguments of ``torch.onnx.export``.

    Raises
    ------
    DependencyError
        If a package that the exporter needs is not installed.
    ParamError
        If the module cannot be exported.
    """
    require_packages("export_onnx()", "onnx", "onnxscript")
    if isinstance(module, torch.jit.ScriptModule):
        raise ParamError(
            "model: TorchScript cannot be exported by torch's exporter. Export the module that it "
            "was made of."
        )
    size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    rows = torch.export.Dim("batch")
    with (
        exported(path, overwrite, storage_options) as target,
        _predicting(module),
        _without_torchvisions_warnings(),
    ):
        try:
            torch.onnx.export(
                _Exported(module, call).eval(),
                tuple(inputs.values()),
                target,
                **{
                    "input_names": list(inputs),
                    "output_names": list(outputs),
                    "dynamic_shapes": {"inputs": tuple({0: rows} for _ in inputs)},
                    "external_data": size > _MOST_BYTES,
                    "dynamo": True,
                    "verbose": False,
                    **options,
                },
            )
        except Exception as error:
            raise ParamError(
                f"model: torch's exporter does not take it ({type(error).__name__}: {error})."
            ) from error


@contextlib.contextmanager
def _predicting(module: torch.nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextlib.contextmanager
def _without_torchvisions_warnings() -> Iterator[None]:
    """Hide warnings that torchvision is not installed, which do not concern the module."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
