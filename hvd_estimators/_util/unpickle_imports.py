"""Unpickle safely: import modules first, and keep classes of this process unchanged.

cloudpickle sends the classes of a notebook or script by value. If the process that defines such a
class loads its pickle, cloudpickle replaces the live class's methods. The new methods use a copy of
the notebook's variables as globals. This module keeps a class that the process defines, and creates
loaded objects with that class. A class from an earlier pickle is updated, as in cloudpickle.

The module is also a ``pickle_module`` for ``torch.load``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import IO, Any

from cloudpickle import cloudpickle


class _Call:
    """A call of a function that is made where the object is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: str) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


_modules: list[str] = []
_variables: dict[str, str] = {}


def _set_default(name: str, value: str) -> None:
    os.environ.setdefault(name, value)


def set_first(name: str, value: str) -> None:
    """Make Python workers set an environment variable before they import what a pickle needs."""
    _variables[name] = value


def import_first(module: str) -> None:
    """Make ranks and Python workers import a module before they unpickle objects from here."""
    if module not in _modules:
        _modules.append(module)


def first_imports() -> tuple[Any, ...]:
    """Return the variables and imports to put first in a tuple that other processes unpickle.

    Pickle loads the members in order, so these modules are imported first. The result is usually
    empty. Readers of the tuple must index its members from the end.
    """
    return (
        *(_Call(_set_default, name, value) for name, value in _variables.items()),
        *(_Call(importlib.import_module, module) for module in _modules),
    )


_recorded: ContextVar[set[str] | None] = ContextVar("_recorded", default=None)


@contextlib.contextmanager
def recording_modules() -> Iterator[set[str]]:
    """Yield the set of top-level modules that objects loaded in the block import."""
    modules: set[str] = set()
    token = _recorded.set(modules)
    try:
        yield modules
    finally:
        _recorded.reset(token)


def _record(module: str) -> None:
    modules = _recorded.get()
    if modules is not None:
        modules.add(module.partition(".")[0])


# Classes that were created by loading a pickle.
_received: weakref.WeakSet[type] = weakref.WeakSet()


class Unpickler(pickle.Unpickler):
    """Unpickler that keeps classes of this process unchanged."""

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._kept_classes: dict[int, type] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a class or function by its name; called by pickle."""
        _record(module)
        value = super().find_class(module, name)
        if value is cloudpickle.subimport:
            return _import_recorded
        if value is cloudpickle._make_skeleton_class or value is cloudpickle._make_skeleton_enum:
            return lambda *args: self._make_class(value, args)
        if value is cloudpickle._class_setstate:
            return self._fill_class
        return value

    def _make_class(self, make: Callable[..., type], args: tuple[Any, ...]) -> type:
        # After the tracker's ID, there is one more argument, reserved for later versions.
        own_class = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
        if own_class is not None and own_class not in _received:
            self._kept_classes[id(own_class)] = own_class
            return own_class
        new_class = make(*args)
        _received.add(new_class)
        return new_class

    def _fill_class(self, cls: type, state: Any) -> type:
        return cls if id(cls) in self._kept_classes else cloudpickle._class_setstate(cls, state)


def _import_recorded(module: str) -> Any:
    """Import a module that a pickled function uses."""
    _record(module)
    return cloudpickle.subimport(module)


def load(file: IO[bytes], **options: Any) -> Any:
    """Load the object from an open file."""
    return Unpickler(file, **options).load()


def loads(document: bytes, **options: Any) -> Any:
    """Load the object from bytes."""
    return load(io.BytesIO(document), **options)
