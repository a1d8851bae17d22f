"""State of the user's objects in checkpoints: schedulers, scalers, averages of weights.

A checkpoint holds the state of an object if it has ``state_dict()`` and ``load_state_dict()``, and
is given in a param, or is an attribute (or in a list or dict that is one) of a given object, of the
module or of its layers. Used by torch and Lightning.
"""

from __future__ import annotations

import collections
import inspect
import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from hvd_estimators._util.documents import to_python
from hvd_estimators.torch.serialization import load_state, plain_module, save_state

logger = logging.getLogger(__name__)

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
_DICTS = (dict, collections.OrderedDict)
_LISTS = (list, tuple)
_MANAGED = frozenset(vars(torch.nn.Module()))


class StatefulObjects:
    """States of the user's objects, for saving and restoring.

    If a given object lacks the two methods, its attributes that have them are saved. The parameters
    of an optimizer that no other object saves are saved with the optimizer.

    Parameters
    ----------
    given : mapping
        Param name to the given object, or to a list of objects.
    module : torch.nn.Module
        The trained module. Its attributes and its layers' attributes are saved, too.
    library_objects : iterable of object
        Objects with a state that is saved elsewhere, such as the optimizer.
    ignored : iterable of str
        Attributes of the module that do not belong to the user.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        module: torch.nn.Module,
        library_objects: Iterable[Any] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        self._given = given
        self._module = module
        self._ignored = _MANAGED | frozenset(ignored)
        self._library_objects = tuple(library_objects)
        self._warned: set[str] = set()

    def capture(self) -> dict[str, Any]:
        """Return the states by name, if they are tensors and plain values.

        Other states are skipped with a warning, because loading them would run code from the file.
        """
        states = {}
        for name, value in self.items():
            try:
                state = to_python(value.state_dict())
            except Exception as error:
                self._warn(name, value, f"failed ({type(error).__name__}: {error})")
                continue
            if not is_loadable(state):
                self._warn(name, value, "returns more than tensors and plain values")
            elif state:
                states[name] = state
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Load the states into the objects with these names."""
        objects = dict(self.items()) if states else {}
        for name, state in states.items():
            if name in objects:
                objects[name].load_state_dict(state)
            else:
                logger.warning(
                    "%s: the run's checkpoint holds its state, and the object does not exist when "
                    "training starts. It starts without that state. Create it in "
                    "on_train_begin() or earlier; in a LightningModule in configure_optimizers() "
                    "or earlier.",
                    name,
                )

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield name and object for each object that has a state."""
        visited = {id(part) for part in (*self._module.modules(), *self._library_objects)}
        found = []
        for name, value in self._candidates():
            plain = plain_module(value) if isinstance(value, torch.nn.Module) else value
            if has_state(value) and visited.isdisjoint((id(value), id(plain))):
                visited.add(id(value))
                found.append((name, value))
        yield from found
        saved = set(self._module.parameters())
        for _, value in found:
            if isinstance(value, torch.nn.Module):
                saved.update(value.parameters())
        for name, value in found:
            if isinstance(value, torch.optim.Optimizer):
                trained = (p for group in value.param_groups for p in group["params"])
                if unsaved := [parameter for parameter in trained if parameter not in saved]:
                    yield f"{name}.params", _Parameters(unsaved)

    def _candidates(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._given.items():
            is_list = isinstance(value, _LISTS)
            of_class: collections.Counter[str] = collections.Counter()
            for entry in value if is_list else [value]:
                kind = type(entry).__qualname__
                # Another fit of the run may have other objects.
                entry_name = f"{name}.{kind}[{of_class[kind]}]" if is_list else name
                of_class[kind] += 1
                yield entry_name, entry
                if not has_state(entry):
                    yield from _attributes(entry_name, entry)
        for path, part in self._module.named_modules():
            name = f"model.{path}" if path else "model"
            yield from _attributes(name, part, self._ignored)

    def _warn(self, name: str, value: Any, reason: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "%s: %s.state_dict() %s. Checkpoints do not hold its state, and a resumed run "
                "starts without it. Return tensors and plain values from state_dict().",
                name,
                type(value).__name__,
                reason,
            )


class _Parameters:
    """State of parameters that belong to no saved module."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        return {"params": [parameter.detach() for parameter in self._parameters]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for parameter, saved in zip(self._parameters, state["params"], strict=True):
                parameter.copy_(saved)


def _attributes(name: str, value: Any, ignored: Iterable[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, and the entries of those that are lists, tuples or dicts."""
    for attribute, entry in list(getattr(value, "__dict__", {}).items()):
        if attribute not in ignored:
            yield f"{name}.{attribute}", entry
            if isinstance(entry, (*_LISTS, *_DICTS)):
                pairs = entry.items() if isinstance(entry, _DICTS) else enumerate(entry)
                yield from ((f"{name}.{attribute}[{key!r}]", part) for key, part in pairs)


def has_state(value: Any) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    if isinstance(value, (type, ModuleType, *_PLAIN)):
        return False
    # Static lookup, because some objects return a value for any name.
    methods = (inspect.getattr_static(value, m, None) for m in ("state_dict", "load_state_dict"))
    return all(method is not None for method in methods)


def is_loadable(state: Any) -> bool:
    """Return whether a state can be loaded without running code from the file."""
    if type(state) in _PLAIN:
        return True
    if type(state) in _DICTS:
        return all(is_loadable(part) for pair in state.items() for part in pair)
    if type(state) in _LISTS:
        return all(map(is_loadable, state))
    file = io.BytesIO()
    try:
        save_state({"state": state}, file)
        file.seek(0)
        load_state(file)
    except Exception as error:
        logger.debug("A state cannot be loaded", exc_info=error)
        return False
    return True
