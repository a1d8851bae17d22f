"""Lazy imports of public names, and hooks on the imports of other packages."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.abc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.exceptions import DependencyError

logger = logging.getLogger(__name__)


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
        By ``__getattr__``, if a package listed in `hvd_estimators._util.install_hints` is missing,
        or if the installed Horovod was built for another framework.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home, _, other = homes[name].partition(":")
            return getattr(importlib.import_module(home), other or name)
        except ImportError as error:
            missing = (error.name or "").split(".")[0]
            if not isinstance(error, ModuleNotFoundError):
                if missing == "horovod":
                    raise DependencyError(f"{package} needs horovod. {error}") from error
                raise
            remedy = INSTALL.get(missing)
            if remedy is None:
                raise
            raise DependencyError(
                f"{package} needs {missing}, which is not installed. Run: {remedy}"
            ) from error

    return get, lambda: sorted({*homes, *vars(sys.modules[package])})


@contextlib.contextmanager
def after_import(name: str, action: Callable[[ModuleType], None]) -> Iterator[None]:
    """Call a function with a module as soon as the module has been imported.

    If the module is imported already, the function is called at once. The hook ends with the block.

    Parameters
    ----------
    name : str
        Full name of the module.
    action : callable
        Called with the module, before any other code sees it.
    """
    if name in sys.modules:
        action(sys.modules[name])
        yield
        return
    finder = AfterImport(name, action)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class AfterImport(importlib.abc.MetaPathFinder):
    """Import hook that calls a function with a module; see `after_import`."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the awaited module, whose loader then calls the function."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._action(module)

        loader.exec_module = execute_and_act
        return spec


def make_triton_import_safe() -> None:
    """Make later imports of triton in this process use triton's own LLVM.

    TensorFlow exports the symbols of its copy of LLVM to the whole process. If triton's extension
    module is loaded after TensorFlow, triton calls TensorFlow's LLVM, and the process ends with a
    segmentation fault. torch imports triton with ``torch._dynamo``, and so does Lightning.

    This function makes no import slower. If TensorFlow is loaded before triton, triton's extension
    module is first loaded with ``RTLD_DEEPBIND``. The module's own symbols then take precedence
    over the process's symbols. See dlopen(3).
    """
    if "triton" in sys.modules or any(isinstance(f, _TritonFinder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _TritonFinder())


class _TritonFinder(importlib.abc.MetaPathFinder):
    """Import hook that loads triton's extension module before other finders find triton."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return no module: this finder only prepares the process."""
        if name == "triton" and "tensorflow" in sys.modules:
            spec = PathFinder.find_spec(name)
            for folder in (spec and spec.submodule_search_locations) or ():
                _bind_own_symbols(Path(folder))
        return None


def _bind_own_symbols(triton: Path) -> None:
    if not hasattr(os, "RTLD_DEEPBIND"):  # systems that triton does not support
        return
    for library in sorted(triton.glob("_C/libtriton*.so")):
        try:
            # Python reuses a library that is already loaded.
            ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        except OSError as error:
            logger.debug("%s cannot be loaded: %s", library, error)
