"""Modules that a warm process imports before it knows its rank.

Packages of the list below have been looked at: importing them starts no thread that a fork loses,
touches no GPU and draws no random numbers. A user's own modules are never among them: they may have
changed by the next launch.

The bytes of such a call hold no more than the names of a module and of a function in it. Here the
function itself is looked at, and its module as it is on the driver, so that a process that forks
ranks can import the frameworks that they use. Nothing is imported or run for that.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["known_module", "modules_behind", "modules_of", "modules_of_call"]

_PACKAGES = (
    "hvd_estimators",
    "horovod",
    "keras",
    "lightning",
    "numpy",
    "pandas",
    "petastorm",
    "pyarrow",
    "pytorch_lightning",
    "tensorflow",
    "torch",
)


# Of these a submodule brings in a framework, and the package itself none.
_BY_SUBMODULE = {"hvd_estimators": None, "horovod": 2}


# The one changes what the other is, which is a job's own affair: others fork from the process, too.
_NEVER = ("horovod.spark", "hvd_estimators.compat")


# Of torch, an optimizer that is made imports another second of it in each rank. The trainers make
# one, whatever their users do.
_IMPORTED_LATER = {
    "hvd_estimators.torch.trainer": "torch._dynamo",
    "hvd_estimators.lightning.trainer": "torch._dynamo",
}


# A short text in a pickle: a code, its length, and the text.
_MENTIONED = re.compile(
    rb"\x8c(.)((?:" + "|".join(_PACKAGES).encode() + rb")(?:\.[A-Za-z_][A-Za-z0-9_]*)*)", re.DOTALL
)


# Code and classes come before data, or after it.
_LOOKED_AT_BYTES = 2**20


def modules_of(call: bytes) -> tuple[str, ...]:
    """Return modules that a pickled call will import, as far as its bytes tell.

    A function that travels by value holds the names of what it imports, and everything that travels
    by reference the name of its module.

    Parameters
    ----------
    call : bytes
        What `hvd_estimators.launch.rank.process.pickle_call` returned.
    """
    found = set()
    for part in (call[:_LOOKED_AT_BYTES], call[_LOOKED_AT_BYTES:][-_LOOKED_AT_BYTES:]):
        for length, text in _MENTIONED.findall(part):
            # What is longer begins like a module and is none.
            if length[0] == len(text):
                found.add(text.decode())
    found |= {_IMPORTED_LATER[name] for name in found & _IMPORTED_LATER.keys()}
    return tuple(sorted({name for name in map(_to_import, found) if name}))


def known_module(name: str) -> str | None:
    """Return the module to import for one, an empty text for none; None if it is not known."""
    return _to_import(name) if name.partition(".")[0] in _PACKAGES else None


def _to_import(name: str) -> str:
    """Return the module to import for one that is mentioned; empty if there is none."""
    package, _, rest = name.partition(".")
    if name in _IMPORTED_LATER.values():
        return name
    if package not in _BY_SUBMODULE:
        return package
    if any(f"{name}.".startswith(f"{never}.") for never in _NEVER):
        return ""
    if not rest:
        return ""
    parts = _BY_SUBMODULE[package]
    return ".".join(name.split(".")[:parts])


# Of a call, and what it refers to.
_MOST_OBJECTS = 500


# What others have written imports much that a call does not come to.
_INSTALLED = ("site-packages", "dist-packages")


_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def modules_of_call(document: bytes, *called: Any) -> tuple[str, ...]:
    """Return known modules that ranks will import for a call, as far as can be told.

    Parameters
    ----------
    document : bytes
        The call, pickled.
    *called
        Its function and arguments.
    """
    return tuple(sorted({*modules_of(document), *modules_behind(*called)}))


def modules_behind(*called: Any) -> set[str]:
    """Return known modules that functions and classes use, and their own modules import.

    Parameters
    ----------
    *called
        Functions and their arguments; of lists, tuples and dicts what they hold counts.

    Returns
    -------
    set of str
        Names as `hvd_estimators.launch.warm.modules` knows them.
    """
    found: set[str] = set()
    seen: set[int] = set()
    waiting = deque(called)
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.popleft()
        if id(value) not in seen:
            seen.add(id(value))
            # Whatever an object of a user's does when it is looked at, its call may work.
            with contextlib.suppress(Exception):
                waiting.extend(_looked_at(value, found))
    return found


def _looked_at(value: Any, found: set[str]) -> Iterable[Any]:
    """Return what a value refers to; adds the known modules among it to those found."""
    # An object may stand for another one, and import things when it is asked for its class.
    kind = type(value)
    if kind in (list, tuple):
        return value
    if kind is dict:
        return value.values()
    if issubclass(kind, ModuleType):
        return _of_module(value, found)
    if kind is FunctionType:
        if _is_known(str(value.__module__), found):
            return ()
        return [*_of_code(value.__code__, value.__globals__, found), *_home(value.__module__)]
    if kind is MethodType:
        return [value.__func__, value.__self__]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if issubclass(kind, type):
        if _is_known(str(value.__module__), found):
            return ()
        return [*_functions_of(value), *value.__bases__, *_home(str(value.__module__))]
    return (kind,)


def _functions_of(kind: type) -> Iterable[Any]:
    for part in vars(kind).values():
        if type(part) in (staticmethod, classmethod):
            part = part.__func__
        elif type(part) is property:
            part = part.fget
        if type(part) is FunctionType:
            yield part


def _of_module(module: ModuleType, found: set[str]) -> Iterable[Any]:
    names = ModuleType.__getattribute__(module, "__dict__")
    if _is_known(str(names.get("__name__", "")), found) or not _is_users(names):
        return ()
    package = str(names["__name__"]).partition(".")[0]
    further = []
    for value in list(names.values()):
        kind = type(value)
        if issubclass(kind, ModuleType):
            its = ModuleType.__getattribute__(value, "__dict__")
            if not _is_known(str(its.get("__name__", "")), found) and _is_near(its, package):
                further.append(value)
            continue
        is_named = kind is FunctionType or issubclass(kind, type)
        home = value.__module__ if is_named else kind.__module__
        if not _is_known(str(home), found) and str(home).partition(".")[0] == package:
            further += _home(str(home))
    return further


def _of_code(code: CodeType, names: Mapping[str, Any], found: set[str]) -> Iterable[Any]:
    further = []
    for name in code.co_names:
        if name in names:
            further.append(names[name])
        elif _DOTTED.fullmatch(name):
            # Imported within the function; an attribute may have the same name.
            _is_known(name, found)
    for part in code.co_consts:
        if type(part) is CodeType:
            further += _of_code(part, names, found)
    return further


def _home(name: str | None) -> list[ModuleType]:
    module = sys.modules.get(name or "")
    return [] if module is None or name == "__main__" else [module]


def _is_users(names: Mapping[str, Any]) -> bool:
    """Return whether a module is neither Python's nor compiled."""
    package = str(names["__name__"]).partition(".")[0]
    path = names.get("__file__")
    is_python = isinstance(path, str) and path.endswith((".py", ".pyc"))
    return is_python and package not in sys.stdlib_module_names


def _is_near(names: Mapping[str, Any], package: str) -> bool:
    """Return whether a module is of a package, or one that nobody has installed."""
    if str(names.get("__name__", "")).partition(".")[0] == package:
        return True
    return not any(folder in str(names.get("__file__")) for folder in _INSTALLED)


def _is_known(name: str, found: set[str]) -> bool:
    """Return whether a module is of a package that is known; adds what to import for it."""
    imported = known_module(name)
    if imported is None:
        return False
    found.update([imported] if imported else [])
    return True
