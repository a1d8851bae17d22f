"""Modules that other processes import before they unpickle what this one sends them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["first_imports", "import_first"]

_modules: list[str] = []


class _Import:
    """Pickles as the import of a module, which then takes its place."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self._module,)


def import_first(module: str) -> None:
    """Have ranks and Python workers import a module before they unpickle what is sent from here."""
    if module not in _modules:
        _modules.append(module)


def first_imports() -> tuple[Any, ...]:
    """Return what goes to the front of a tuple that is pickled for other processes.

    What is unpickled first is imported first. None, mostly; who unpickles the tuple counts its
    members from the end.
    """
    return tuple(map(_Import, _modules))
