"""Import triton safely in a process that has loaded TensorFlow.

TensorFlow exports the symbols of its copy of LLVM to the whole process. If triton's extension
module is loaded after it, triton calls TensorFlow's LLVM instead of its own, and the process ends
with a segmentation fault. torch imports triton with ``torch._dynamo``, and so does Lightning.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["make_triton_import_safe"]

logger = logging.getLogger(__name__)


def make_triton_import_safe() -> None:
    """Let any later import of triton in this process use triton's own LLVM.

    The import costs what it did. Where TensorFlow is loaded by then, the extension module is loaded
    first with ``RTLD_DEEPBIND``: its own symbols then come before the process's. See dlopen(3).
    """
    if "triton" in sys.modules or any(isinstance(f, _TritonFinder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _TritonFinder())


class _TritonFinder(importlib.abc.MetaPathFinder):
    """Loads triton's extension module just before triton's package is found by other finders."""

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
    for library in sorted(triton.glob("_C/libtriton*.so")):
        try:
            # Python finds a library that is loaded already, and does not load it again.
            ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        except OSError as error:
            logger.debug("%s cannot be loaded: %s", library, error)
