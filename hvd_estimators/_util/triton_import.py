"""Import triton safely in a process that has loaded TensorFlow.

TensorFlow exports the symbols of its copy of LLVM to the whole process. If triton's extension
module is loaded after TensorFlow, triton calls TensorFlow's LLVM, not the LLVM inside triton. The
process then ends with a segmentation fault. torch imports triton with ``torch._dynamo``, and so
does Lightning.
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
    """Make later imports of triton in this process use triton's own LLVM.

    The import itself is not slower. If TensorFlow is loaded by then, triton's extension module is
    first loaded with ``RTLD_DEEPBIND``. The module's own symbols then take precedence over the
    process's symbols. See dlopen(3).
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
    for library in sorted(triton.glob("_C/libtriton*.so")):
        try:
            # Python reuses a library that is already loaded.
            ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        except OSError as error:
            logger.debug("%s cannot be loaded: %s", library, error)
