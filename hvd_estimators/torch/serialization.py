"""Modules and optimizers as bytes, so that an optimizer comes back bound to its module."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import cloudpickle
import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.plain import plain

__all__ = [
    "dump_module",
    "dump_optimizer",
    "load_module",
    "load_optimizer",
    "load_state",
    "plain_module",
    "save_state",
]

logger = logging.getLogger(__name__)

_SCRIPT, _PICKLE = b"S", b"P"


def plain_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` was given; any other module as it is.

    Both have the same parameters; the names of a compiled one's carry a prefix.
    """
    # torch.compile keeps the module there, and prefixes names with this.
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def dump_module(module: torch.nn.Module) -> bytes:
    """Return a module as bytes: TorchScript as TorchScript, all others pickled by value.

    One that ``torch.compile`` has made is compiled again, with the same options, when it is first
    called there; where its options cannot be pickled it comes back as the plain module.
    """
    if isinstance(module, torch.jit.ScriptModule):
        buffer = io.BytesIO()
        torch.jit.save(module, buffer)
        return _SCRIPT + buffer.getvalue()
    plain = plain_module(module)
    if plain is not module:
        try:
            return _PICKLE + cloudpickle.dumps(module)
        except Exception as error:
            logger.warning(
                "model: what torch.compile was told cannot be sent to other processes (%s: %s). "
                "They run the module as it is, without compiling it.",
                type(error).__name__,
                error,
            )
    # If Lightning is imported, torch.compile notes its arguments on the module that it is given.
    if "_compile_kwargs" in vars(plain):
        plain = copy.copy(plain)
        del vars(plain)["_compile_kwargs"]
    return _PICKLE + cloudpickle.dumps(plain)


def load_module(document: bytes) -> torch.nn.Module:
    """Return the module that `dump_module` wrote, on the CPU."""
    kind, content = document[:1], document[1:]
    if kind == _SCRIPT:
        return torch.jit.load(io.BytesIO(content), map_location="cpu")
    module: torch.nn.Module = pickle.loads(content)
    return module


def dump_optimizer(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> bytes:
    """Return an optimizer as bytes that hold names instead of the module's parameters.

    Parameter groups, options and state come back as they are, for any optimizer class.

    Raises
    ------
    ParamError
        If the optimizer holds a parameter that is not one of the module's.
    """
    named = plain_module(module).named_parameters()
    names = {id(parameter): name for name, parameter in named}
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
    parameters = dict(plain_module(module).named_parameters())

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> torch.nn.Parameter:
            return parameters[pid]

    optimizer: torch.optim.Optimizer = Unpickler(io.BytesIO(document)).load()
    return optimizer


def save_state(state: dict[str, Any]) -> bytes:
    """Return tensors and plain values as the bytes of a ``torch.save`` file.

    An optimizer's options may be NumPy's scalars, which `load_state` would refuse.
    """
    buffer = io.BytesIO()
    torch.save(plain(state), buffer)
    return buffer.getvalue()


def load_state(document: bytes) -> dict[str, Any]:
    """Return what `save_state` wrote, on the CPU; runs no code from the file."""
    state: dict[str, Any] = torch.load(io.BytesIO(document), map_location="cpu", weights_only=True)
    return state
