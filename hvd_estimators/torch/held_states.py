"""The states of what users' objects hold: schedulers, gradient scalers, averages of weights.

Callbacks, ``train_minibatch_fn`` and losses of the user's keep state between steps that training
goes on from. Whatever has ``state_dict()`` and ``load_state_dict()``, as PyTorch's own objects do,
is kept: the object itself, or else what it holds. What must be the same on all ranks anyway is kept
of rank 0.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from hvd_estimators.plain import plain
from hvd_estimators.torch.checkpoint import load_file, save_file

__all__ = ["HeldStates"]

logger = logging.getLogger(__name__)

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
_DICTS = (dict, collections.OrderedDict)
_LISTS = (list, tuple)


class HeldStates:
    """Captures and restores the states of users' objects.

    Parameters
    ----------
    owners : mapping
        Name to object of the user's, or to a list of them; the name says where it was given.
    known : iterable of object
        What is saved elsewhere: the module, its parts, the optimizer.
    """

    def __init__(self, owners: Mapping[str, Any], known: Iterable[Any] = ()) -> None:
        self._owners = owners
        self._known = {id(value): value for value in known}
        self._told: set[str] = set()

    def capture(self) -> dict[str, Any]:
        """Return the states by name, as far as they are tensors and plain values.

        What else there is is left out with a warning: loading it would run code from the file.
        """
        states = {}
        for name, held in self._held():
            try:
                state = plain(held.state_dict())
            except Exception as error:
                self._tell(name, held, f"failed ({type(error).__name__}: {error})")
                continue
            if not _is_loadable(state):
                self._tell(name, held, "returns more than tensors and plain values")
            elif state:
                states[name] = state
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give the objects back the states that they had."""
        held = dict(self._held())
        for name, state in states.items():
            if name in held:
                held[name].load_state_dict(state)
            else:
                logger.warning(
                    "%s: the run's checkpoint holds its state, and it is not there when training "
                    "begins. It starts anew. Make it in on_train_begin() or earlier.",
                    name,
                )

    def _held(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        roots: list[tuple[str, Any]] = []
        for name, owner in self._owners.items():
            roots += _parts(name, owner) if isinstance(owner, _LISTS) else [(name, owner)]
        for name, owner in roots:
            for path, held in _stateful(name, owner, set(self._known), depth=3):
                # It may be in the hands of several.
                if id(held) not in seen:
                    seen.add(id(held))
                    yield path, held

    def _tell(self, name: str, held: Any, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning(
                "%s: %s.state_dict() %s. It is not kept: a resumed run begins without it.",
                name,
                type(held).__name__,
                what,
            )


def _stateful(name: str, value: Any, known: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield what has state: a value itself, or else its parts."""
    if id(value) in known or depth < 0:
        return
    known.add(id(value))
    if _has_state(value):
        yield name, value
        return
    for part, found in _parts(name, value):
        if isinstance(found, (*_LISTS, *_DICTS)) or _is_function(found) or _has_state(found):
            yield from _stateful(part, found, known, depth - 1)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that are not plain, each with a name that says where it is."""
    # A list with a number of each batch is looked through at each checkpoint.
    if isinstance(value, _DICTS):
        for key, entry in value.items():
            if type(entry) not in _PLAIN:
                yield f"{name}[{key!r}]", entry
    elif isinstance(value, _LISTS):
        for index, entry in enumerate(value):
            if type(entry) not in _PLAIN:
                yield f"{name}[{index}]", entry
    elif isinstance(value, functools.partial):
        yield f"{name}.func", value.func
        yield from _parts(f"{name}.args", value.args)
        yield from _parts(f"{name}.keywords", value.keywords)
    elif isinstance(value, MethodType):
        owner = value.__self__
        yield from [(name, owner)] if _has_state(owner) else _parts(name, owner)
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        used = {part: cell.cell_contents for part, cell in cells if cell != CellType()}
        names = _globals_of(value.__code__) & value.__globals__.keys()
        used.update((part, value.__globals__[part]) for part in sorted(names))
        for part, found in used.items():
            # Not the functions of libraries, and what these use.
            if getattr(found, "__module__", None) == value.__module__ or not _is_function(found):
                yield f"{name}.{part}", found
    else:
        for part, found in getattr(value, "__dict__", {}).items():
            yield f"{name}.{part}", found


@functools.lru_cache
def _globals_of(code: CodeType) -> frozenset[str]:
    """Return the names of the global variables that a function uses."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")


def _is_function(value: Any) -> bool:
    return isinstance(value, (functools.partial, MethodType, FunctionType))


def _has_state(value: Any) -> bool:
    if isinstance(value, (type, ModuleType)):
        return False
    # Static, since some objects answer to any name.
    methods = (inspect.getattr_static(value, m, None) for m in ("state_dict", "load_state_dict"))
    return all(method is not None for method in methods)


def _is_loadable(state: Any) -> bool:
    """Return whether a state can be loaded without running code from the file."""
    if type(state) in _PLAIN:
        return True
    if type(state) in _DICTS:
        return all(_is_loadable(part) for pair in state.items() for part in pair)
    if type(state) in _LISTS:
        return all(map(_is_loadable, state))
    file = io.BytesIO()
    try:
        save_file({"state": state}, file)
        file.seek(0)
        load_file(file)
    except Exception as error:
        logger.debug("A state cannot be loaded", exc_info=error)
        return False
    return True
