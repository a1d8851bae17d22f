"""Private copies of a user's objects, for trials in the process that made them.

Functions and classes of scripts and notebooks are copied with the globals that they use, as for the
ranks, so that a trial changes none of the user's objects. cloudpickle alone would not copy such a
class in the process that made it: it would overwrite the class.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Iterator
from typing import Any, TypeVar

import cloudpickle
import torch

from hvd_estimators.torch.pickling import Pickler

__all__ = ["copied"]

T = TypeVar("T")


def copied(value: T) -> T:
    """Return a copy of objects that may refer to each other, as a whole.

    Unlike `copy.deepcopy` this copies functions, modules with tensors that were computed from
    others (``torch.nn.utils.weight_norm``), and all attributes of an optimizer.

    Raises
    ------
    Exception
        If an object cannot be pickled; of any kind.
    """
    buffer = io.BytesIO()
    copier = _Copier(buffer)
    copier.dump(value)
    buffer.seek(0)
    loaded: T = _Loader(buffer, copier.kept).load()
    return loaded


class _Copier(Pickler):
    """Pickles references to copies of tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.kept: list[Any] = []
        self._positions: dict[int, int] = {}
        self._alive: list[Any] = []
        self._memo: dict[int, Any] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """Return the position in ``kept`` of what is not pickled; called by pickle."""
        if not isinstance(obj, (torch.Tensor, torch.jit.ScriptModule)):
            return None
        known = self._positions.get(id(obj))
        if known is not None:
            return known
        for original, replacement in self._copies(obj):
            self._positions[id(original)] = len(self.kept)
            self.kept.append(replacement)
            # As long as it lives no other object has its id.
            self._alive.append(original)
        return self._positions[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled; called by pickle."""
        if isinstance(obj, torch.optim.Optimizer):
            # The class's own way leaves out what subclasses hold. A scheduler wraps step().
            held = {name: value for name, value in vars(obj).items() if name != "step"}
            return object.__new__, (type(obj),), held
        return super().reducer_override(obj)

    def _copies(self, obj: Any) -> Iterator[tuple[Any, Any]]:
        """Yield an object and its copy; of a script its parameters, too."""
        if isinstance(obj, torch.Tensor):
            # torch copies no tensors that were computed from others.
            is_leaf = obj.is_leaf
            yield obj, copy.deepcopy(obj, self._memo) if is_leaf else obj.detach().clone()
        else:
            script = copy.deepcopy(obj)
            yield obj, script
            yield from zip(obj.parameters(), script.parameters(), strict=True)


class _Loader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        return self._kept[pid]

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found in _MAKING_CLASSES:
            return functools.partial(_new_class, found)
        return found


_MAKING_CLASSES = (
    cloudpickle.cloudpickle._make_skeleton_class,
    cloudpickle.cloudpickle._make_skeleton_enum,
)


def _new_class(make: Any, *arguments: Any) -> Any:
    """Make a class of a pickle, and not the one of this process with the same tracker id."""
    *given, _, extra = arguments
    return make(*given, None, extra)
