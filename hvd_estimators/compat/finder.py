"""Import hooks that serve ``horovod.spark`` and its submodules from this package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hvd_estimators._util.horovod_spark_names import HOMES, LEFT_OUT_MODULES, LEFT_OUT_NAMES
from hvd_estimators._util.lazy_imports import AfterImport, lazy_names
from hvd_estimators._util.unpickle_imports import import_first
from hvd_estimators.exceptions import LeftOutError, did_you_mean

SPARK = "hvd_estimators.compat.spark"
"""Real name of the module behind ``horovod.spark``; wheels and pickles refer to it."""

ALIASES = {
    "horovod.spark": SPARK,
    # Horovod's own do not work with Keras 3, and its scripts for Spark use them.
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


class _NamesLoader(Loader):
    """Makes a module of `HOMES`, which imports each name on first use."""

    def __init__(self, key: str) -> None:
        self._key = key

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        module_name = _joined("horovod.spark", self._key)
        get, listed = lazy_names(module.__name__, HOMES[self._key])

        def get_or_explain(name: str) -> Any:
            _check_name(module_name, name)
            try:
                return get(name)
            except AttributeError:
                hint = did_you_mean(name, listed())
                raise AttributeError(
                    f"module {module_name!r} has no attribute {name!r}.{hint}"
                ) from None

        module.__doc__ = f"``{module_name}``; see `hvd_estimators._util.horovod_spark_names`."
        vars(module).update(
            __all__=sorted(HOMES[self._key]), __getattr__=get_or_explain, __dir__=listed
        )
        if self._key == "lightning":
            importlib.import_module("hvd_estimators.compat.lightning").restore_names()


class _AliasLoader(Loader):
    """Loader that returns a module with another name, and leaves it unchanged."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import has made it the spec of the other name.
        module.__spec__ = self._spec


def _complete(module: ModuleType) -> None:
    """Replace some functions of a Horovod module by this package's."""
    importlib.import_module(COMPLETED[module.__name__]).complete(module)


class _AliasFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in COMPLETED:
            return AfterImport(fullname, _complete).find_spec(fullname, path, target)
        key = fullname.removeprefix(SPARK).removeprefix(".")
        if fullname == _joined(SPARK, key) and key in HOMES:
            is_package = not key or any(other.startswith(f"{key}.") for other in HOMES)
            return ModuleSpec(fullname, _NamesLoader(key), is_package=is_package)
        real = _real_name(fullname)
        if real is None:
            return None
        _check_module(fullname)
        spec = importlib.util.find_spec(real)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(real), origin=spec.origin, is_package=is_package)


def _joined(package: str, key: str) -> str:
    return f"{package}.{key}" if key else package


def _real_name(name: str) -> str | None:
    for alias, real in ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            return real + name[len(alias) :]
    return None


def _check_module(name: str) -> None:
    """Raise `LeftOutError` if a module is left out."""
    for left_out, instead in LEFT_OUT_MODULES.items():
        if name == left_out or name.startswith(f"{left_out}."):
            raise _left_out(name, instead)


def _check_name(module: str, name: str) -> None:
    """Raise `LeftOutError` if a name of a module is left out, or is a module that is left out."""
    instead = LEFT_OUT_NAMES.get(module, {}).get(name) or LEFT_OUT_MODULES.get(f"{module}.{name}")
    if instead is not None:
        raise _left_out(f"{module}.{name}", instead)


def _left_out(name: str, instead: str) -> LeftOutError:
    return LeftOutError(f"hvd_estimators has no {name}. {instead}")


def install() -> None:
    """Make ``horovod.spark`` resolve to this package, here and in processes that get its work.

    Importing `hvd_estimators.compat` calls this function. Further calls do nothing.

    Raises
    ------
    LeftOutError
        If another ``horovod.spark`` has been imported before.
    """
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    upstream = sys.modules.get("horovod.spark")
    if upstream is not None and not hasattr(upstream, MARKER):
        raise LeftOutError(
            f"horovod.spark is already imported, from {getattr(upstream, '__file__', None)}. "
            "Import hvd_estimators.compat before it, and leave HVD_ESTIMATORS_HOROVOD_SPARK out of "
            "the environment."
        )
    sys.meta_path.insert(0, _AliasFinder())
    for name in COMPLETED:
        if name in sys.modules:
            _complete(sys.modules[name])
    import_first("hvd_estimators.compat")
