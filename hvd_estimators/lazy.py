"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hvd_estimators.exceptions import DependencyError

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str], remedies: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    homes : mapping
        Public name to the module that it is imported from.
    remedies : mapping, optional
        Package that may not be installed to the command that installs it.

    Raises
    ------
    DependencyError
        By ``__getattr__``, if a package that has a remedy is missing.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            remedy = (remedies or {}).get(missing)
            if remedy is None:
                raise
            raise DependencyError(
                f"{package} needs {missing}, which is not installed. Run: {remedy}"
            ) from error

    return get, lambda: sorted({*homes, *vars(sys.modules[package])})
