"""Pickles of modules by value, those with parametrizations included. Given to ``torch.save``.

``torch.nn.utils.parametrize``, of which ``weight_norm``, ``spectral_norm`` and ``orthogonal`` are
made, gives a module a class of its own, which refuses to be pickled. Here such a module is made
anew from the class that it had, and gets its parametrizations back with its other attributes.
"""

from __future__ import annotations

import copyreg
from types import FunctionType
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

__all__ = ["OptimizerPickler", "Pickler"]


class Pickler(cloudpickle.Pickler):
    """Pickles as cloudpickle does, and modules with parametrizations, too."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled; called by pickle."""
        if isinstance(obj, torch.nn.Module) and parametrize.is_parametrized(obj):
            given = parametrize.type_before_parametrizations(obj)
            # Python 3.11 and later have one for all objects.
            get_state = getattr(given, "__getstate__", None)
            state = dict(vars(obj)) if get_state is None else get_state(obj)
            tensors: Any = obj.parametrizations
            return _parametrized, (given, tuple(tensors)), state
        if isinstance(obj, FunctionType) and _calls_hooks(obj):
            return _itself, (obj.__wrapped__,)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _calls_hooks(function: FunctionType) -> bool:
    """Return whether torch has wrapped the ``step`` of an optimizer class to call hooks.

    The wrapper would travel with a copy of torch's table of hooks, and call none of a rank's. Torch
    wraps the function again when an object of the class is made or unpickled.
    """
    wrap = torch.optim.Optimizer.profile_hook_step
    return function.__globals__ is wrap.__globals__ and hasattr(function, "hooked")


def _itself(function: FunctionType) -> FunctionType:
    return function


class OptimizerPickler(Pickler):
    """Pickles all attributes of optimizers; torch drops those that it does not know."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled; called by pickle."""
        if isinstance(obj, torch.optim.Optimizer) and _has_torch_state(obj):
            return copyreg.__newobj__, (type(obj),), _optimizer_state(obj)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _has_torch_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is pickled as torch does it, which drops its own attributes."""
    kind, base = type(optimizer), torch.optim.Optimizer
    return kind.__getstate__ is base.__getstate__ and kind.__reduce_ex__ is base.__reduce_ex__


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes, without the hooks that belong to this process."""
    plain = torch.optim.Optimizer([torch.zeros(1)], {})
    bookkeeping = vars(plain).keys() - plain.__getstate__().keys()
    # A scheduler replaces step() on the object.
    left_out = bookkeeping | {"step"}
    return {name: value for name, value in vars(optimizer).items() if name not in left_out}


def _parametrized(kind: type[torch.nn.Module], names: tuple[str, ...]) -> torch.nn.Module:
    """Return a module some tensors of which are parametrized, and that lacks all else."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name in names:
        module.register_buffer(name, torch.zeros(()))
        parametrize.register_parametrization(module, name, torch.nn.Identity(), unsafe=True)
    return module
