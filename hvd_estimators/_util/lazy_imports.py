"""Lazy imports of a package's public names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.exceptions import DependencyError

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports names on first use.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    homes : mapping
        Public name to its home: ``module``, or ``module:name`` for another name there.

    Raises
    ------
    DependencyError
        By ``__getattr__``, if a package listed in `hvd_estimators._util.install_hints` is missing.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home, _, other = homes[name].partition(":")
            return getattr(importlib.import_module(home), other or name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            remedy = INSTALL.get(missing)
            if remedy is None:
                raise
            raise DependencyError(
                f"{package} needs {missing}, which is not installed. Run: {remedy}"
            ) from error

    return get, lambda: sorted({*homes, *vars(sys.modules[package])})
