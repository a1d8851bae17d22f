"""Pickles of modules by value, those with parametrizations included. Given to ``torch.save``.

``torch.nn.utils.parametrize``, of which ``weight_norm``, ``spectral_norm`` and ``orthogonal`` are
made, gives a module a class of its own, which refuses to be pickled. Here such a module is made
anew from the class that it had, and gets its parametrizations back with its other attributes.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

__all__ = ["Pickler"]


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
        return super().reducer_override(obj)


def _parametrized(kind: type[torch.nn.Module], names: tuple[str, ...]) -> torch.nn.Module:
    """Return a module some tensors of which are parametrized, and that lacks all else."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name in names:
        module.register_buffer(name, torch.zeros(()))
        parametrize.register_parametrization(module, name, torch.nn.Identity(), unsafe=True)
    return module
