"""Trial of unpickling: objects that pickle but cannot be loaded by another process.

A process loads an object only if a class defines its own pickling, because that takes about two
seconds. Runs on the driver and, as its main program, in the process that loads.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hvd_estimators._util import unpickle_imports

logger = logging.getLogger(__name__)

_METHODS = (
    *("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__"),
    *("__getnewargs_ex__", "__getattr__", "__getattribute__", "__setitem__"),
)
# Pickling of these packages is known to work.
_KNOWN = {
    *sys.stdlib_module_names,
    *("hvd_estimators", "cloudpickle", "numpy", "pandas", "pyarrow", "scipy", "sklearn"),
    *("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "timm"),
    *("keras", "tensorflow", "jax", "horovod", "transformers", "tokenizers", "PIL"),
} - {"__main__"}
_MOST_BYTES = 2**28
_SECONDS = 120.0


def has_own_pickling(kind: type) -> bool:
    """Return whether a class changes how its objects are pickled, loaded or created."""
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if is_named_tuple or issubclass(kind, (type, enum.Enum)):
        return False
    owners = (next((c for c in kind.__mro__ if name in vars(c)), object) for name in _METHODS)
    return any(owner.__module__.partition(".")[0] not in _KNOWN for owner in owners)


def loading_errors(documents: Sequence[bytes]) -> list[str | None]:
    """Return the error with which another process loads each pickle; None if it succeeds.

    All are None if they are large, or if no such process can run here.
    """
    untried: list[str | None] = [None] * len(documents)
    if sum(map(len, documents)) > _MOST_BYTES:
        return untried
    command = [sys.executable, "-c", f"from {__name__} import load_all; load_all()"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, input=pickle.dumps(documents), capture_output=True, env=env, timeout=_SECONDS
        )
        errors: list[str | None] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.info("No process could try to load the objects for the ranks (%s)", error)
        return untried
    return errors


def load_all() -> None:
    """Load the pickles of standard input, and write their errors to standard output as JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with out:
        json.dump([_error(document) for document in pickle.load(sys.stdin.buffer)], out)


def _error(document: bytes) -> str | None:
    try:
        unpickle_imports.loads(document)
    except ImportError:  # The ranks' own message names the module and the host.
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def failing(parts: Sequence[Any], documents: Sequence[bytes]) -> tuple[Any, str] | None:
    """Return the part with the smallest pickle that cannot be loaded, and its error."""
    errors = loading_errors(documents)
    failed = [(len(d), n) for n, d in enumerate(documents) if errors[n] is not None]
    if not failed:
        return None
    _, first = min(failed)
    return parts[first], str(errors[first])
