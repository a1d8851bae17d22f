"""Import hooks that map ``horovod.spark`` and its submodules to modules of `compat.spark`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from hvd_estimators._util.unpickling import import_first
from hvd_estimators.compat.left_out import check_module
from hvd_estimators.exceptions import LeftOutError

__all__ = ["MARKER", "install", "is_installed"]

ALIASES = {
    "horovod.spark": "hvd_estimators.compat.spark",
    # Horovod's own callbacks do not work with Keras 3, and Horovod's Spark scripts use them.
    "horovod.keras.callbacks": "hvd_estimators.compat.callbacks",
    "horovod.tensorflow.keras.callbacks": "hvd_estimators.compat.callbacks",
}
"""Mapping of module names, submodules included, to the modules that they stand for."""

COMPLETED = {
    "horovod.keras": "hvd_estimators.compat.horovod_keras",
    "horovod.tensorflow.keras": "hvd_estimators.compat.horovod_keras",
}
"""Mapping of Horovod modules to modules with replacement functions; see ``complete``."""

MARKER = "HVD_ESTIMATORS_COMPAT"
"""Attribute of a ``horovod.spark`` that ``build-horovod --with-compat`` wrote to the wheel."""


class _AliasLoader(Loader):
    """Loader that returns a module with another name, and leaves it unchanged."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import has set the spec of the other name.
        module.__spec__ = self._spec


class _CompletingLoader(SourceFileLoader):
    """Loader of a Horovod module that replaces some of its functions by this package's."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _complete(module)


def _complete(module: ModuleType) -> None:
    importlib.import_module(COMPLETED[module.__name__]).complete(module)


class _AliasFinder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in COMPLETED:
            own = PathFinder.find_spec(fullname, path, target)
            if own is not None and own.origin is not None:
                own.loader = _CompletingLoader(fullname, own.origin)
            return own
        real = _real_name(fullname)
        if real is None:
            return None
        check_module(fullname)
        found = importlib.util.find_spec(real)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(real), origin=found.origin, is_package=is_package)


def _real_name(name: str) -> str | None:
    for alias, real in ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            return real + name[len(alias) :]
    return None


def is_installed() -> bool:
    """Return whether ``horovod.spark`` resolves to this package in this process."""
    return any(isinstance(finder, _AliasFinder) for finder in sys.meta_path)


def install() -> None:
    """Make ``horovod.spark`` resolve to this package, here and in processes that get its work.

    Importing `hvd_estimators.compat` calls this function. Further calls do nothing.

    Raises
    ------
    LeftOutError
        If another ``horovod.spark`` has been imported before.
    """
    if is_installed():
        return
    other = sys.modules.get("horovod.spark")
    if other is not None and not hasattr(other, MARKER):
        raise LeftOutError(
            f"horovod.spark is already imported, from {getattr(other, '__file__', None)}. Import "
            "hvd_estimators.compat before it, and leave HVD_ESTIMATORS_HOROVOD_SPARK out of the "
            "environment."
        )
    sys.meta_path.insert(0, _AliasFinder())
    for name in COMPLETED:
        if name in sys.modules:
            _complete(sys.modules[name])
    import_first("hvd_estimators.compat")
