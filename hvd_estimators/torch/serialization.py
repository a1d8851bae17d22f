"""Modules and optimizers as bytes, so that an optimizer comes back bound to its module."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch

from hvd_estimators.exceptions import ParamError

__all__ = [
    "dump_module",
    "dump_optimizer",
    "load_module",
    "load_optimizer",
    "load_state",
    "save_state",
]

_SCRIPT, _PICKLE = b"S", b"P"


def dump_module(module: torch.nn.Module) -> bytes:
    """Return a module as bytes: TorchScript as TorchScript, all others pickled by value."""
    if isinstance(module, torch.jit.ScriptModule):
        buffer = io.BytesIO()
        torch.jit.save(module, buffer)
        return _SCRIPT + buffer.getvalue()
    return _PICKLE + cloudpickle.dumps(module)


def load_module(document: bytes) -> torch.nn.Module:
    """Return the module that `dump_module` wrote, on the CPU."""
    kind, content = document[:1], document[1:]
    if kind == _SCRIPT:
        return torch.jit.load(io.BytesIO(content), map_location="cpu")
    module: torch.nn.Module = pickle.loads(content)
    return module


def dump_optimizer(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> bytes:
    """Return an optimizer as bytes in which the module's parameters stand as their names.

    Parameter groups, options and state come back as they are, for any optimizer class.

    Raises
    ------
    ParamError
        If the optimizer holds a parameter that is not one of the module's.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ParamError(
                    f"optimizer: it holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not one of the model's. Make the optimizer from model.parameters() of the "
                    "very model that is given."
                )

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return names.get(id(obj)) if isinstance(obj, torch.nn.Parameter) else None

    buffer = io.BytesIO()
    Pickler(buffer).dump(optimizer)
    return buffer.getvalue()


def load_optimizer(document: bytes, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that `dump_optimizer` wrote, bound to a module's parameters."""
    parameters = dict(module.named_parameters())

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> torch.nn.Parameter:
            return parameters[pid]

    optimizer: torch.optim.Optimizer = Unpickler(io.BytesIO(document)).load()
    return optimizer


def save_state(state: dict[str, Any]) -> bytes:
    """Return tensors and plain values as the bytes of a ``torch.save`` file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_state(document: bytes) -> dict[str, Any]:
    """Return what `save_state` wrote, on the CPU; runs no code from the file."""
    state: dict[str, Any] = torch.load(io.BytesIO(document), map_location="cpu", weights_only=True)
    return state
