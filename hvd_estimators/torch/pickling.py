"""Pickling of modules by value, including parametrized modules. Passed to ``torch.save``.

``torch.nn.utils.parametrize``, on which ``weight_norm``, ``spectral_norm`` and ``orthogonal`` are
based, gives a module its own class. That class raises when it is pickled. The picklers here
recreate such a module from its original class, and restore the parametrizations with the other
attributes.
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
    """Pickler like cloudpickle's that also supports modules with parametrizations."""

    def reducer_override(self, obj: Any) -> Any:
        """Return an object's pickle reduction. Called by pickle."""
        if isinstance(obj, torch.nn.Module) and parametrize.is_parametrized(obj):
            given = parametrize.type_before_parametrizations(obj)
            # In Python 3.11 and later, all objects have __getstate__.
            get_state = getattr(given, "__getstate__", None)
            state = dict(vars(obj)) if get_state is None else get_state(obj)
            tensors: Any = obj.parametrizations
            return _parametrized, (given, tuple(tensors)), state
        if isinstance(obj, FunctionType) and _calls_hooks(obj):
            return _itself, (obj.__wrapped__,)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _calls_hooks(function: FunctionType) -> bool:
    """Return whether torch has wrapped the ``step`` of an optimizer class to call hooks.

    A pickled wrapper would contain a copy of torch's hook table, and would not call a rank's hooks.
    Torch wraps the function again when an object of the class is created or unpickled.
    """
    wrap = torch.optim.Optimizer.profile_hook_step
    return function.__globals__ is wrap.__globals__ and hasattr(function, "hooked")


def _itself(function: FunctionType) -> FunctionType:
    return function


class OptimizerPickler(Pickler):
    """Pickler that saves all attributes of optimizers; torch drops unknown attributes."""

    def reducer_override(self, obj: Any) -> Any:
        """Return an object's pickle reduction. Called by pickle."""
        if isinstance(obj, torch.optim.Optimizer) and _has_torch_state(obj):
            return copyreg.__newobj__, (type(obj),), _optimizer_state(obj)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _has_torch_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer uses torch's pickling, which drops custom attributes."""
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
    """Return a module with some parametrized tensors and without other attributes."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name in names:
        module.register_buffer(name, torch.zeros(()))
        parametrize.register_parametrization(module, name, torch.nn.Identity(), unsafe=True)
    return module
