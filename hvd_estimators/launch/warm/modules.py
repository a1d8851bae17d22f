"""Modules that a warm process imports before it knows its rank.

Only packages of a fixed list are imported. They have been checked: importing them starts no thread
that a fork loses, initialises no GPU and draws no random numbers. The user's own modules are never
imported in advance, because they may change before the next launch.

The modules that a call needs are found in two ways. The bytes of a pickled call contain the names
of modules. If the function is pickled by reference, the bytes contain only the names of its module
and of the function. Therefore the function and its module are inspected, too, to find the
frameworks that they use. The inspection imports no modules and runs no user code. Runs on the
driver.
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


# In these packages only submodules import a framework. The value is the number of name parts to
# import; None means the full name.
_BY_SUBMODULE = {"hvd_estimators": None, "horovod": 2}


# compat replaces horovod.spark. Each job must decide on that itself, because several jobs may fork
# ranks from the same process.
_NEVER = ("horovod.spark", "hvd_estimators.compat")


# The first torch optimizer imports more of torch, which takes another second in each rank. The
# trainers always create one.
_IMPORTED_LATER = {
    "hvd_estimators.torch.trainer": "torch._dynamo",
    "hvd_estimators.lightning.trainer": "torch._dynamo",
}


# A short string in a pickle: an opcode, the length and the text.
_MENTIONED = re.compile(
    rb"\x8c(.)((?:" + "|".join(_PACKAGES).encode() + rb")(?:\.[A-Za-z_][A-Za-z0-9_]*)*)", re.DOTALL
)


# Only the start and the end of a call are searched: code and classes precede or follow the data.
_LOOKED_AT_BYTES = 2**20


def modules_of(call: bytes) -> tuple[str, ...]:
    """Return the known modules whose names occur in the bytes of a pickled call.

    A function that is pickled by value contains the names of its imports. An object that is pickled
    by reference contains the name of its module.

    Parameters
    ----------
    call : bytes
        The pickled call, from `hvd_estimators.launch.rank.process.pickle_call`.
    """
    found = set()
    for part in (call[:_LOOKED_AT_BYTES], call[_LOOKED_AT_BYTES:][-_LOOKED_AT_BYTES:]):
        for length, text in _MENTIONED.findall(part):
            # A longer string only begins like a module name.
            if length[0] == len(text):
                found.add(text.decode())
    found |= {_IMPORTED_LATER[name] for name in found & _IMPORTED_LATER.keys()}
    return tuple(sorted({name for name in map(_to_import, found) if name}))


def known_module(name: str) -> str | None:
    """Return the module to import for a module name; empty for none, None if it is unknown."""
    return _to_import(name) if name.partition(".")[0] in _PACKAGES else None


def _to_import(name: str) -> str:
    """Return the module to import for the name of a known module; empty if there is none."""
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


# Maximum number of inspected objects: the call and the objects that it refers to.
_MOST_OBJECTS = 500


# Installed packages are not inspected, because they import much that the call does not use.
_INSTALLED = ("site-packages", "dist-packages")


_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def modules_of_call(document: bytes, *called: Any) -> tuple[str, ...]:
    """Return the known modules that ranks will probably import for a call.

    Parameters
    ----------
    document : bytes
        The pickled call.
    *called
        The function and arguments of the call.
    """
    return tuple(sorted({*modules_of(document), *modules_behind(*called)}))


def modules_behind(*called: Any) -> set[str]:
    """Return the known modules that functions, classes and their modules use.

    Parameters
    ----------
    *called
        Functions and their arguments. The elements of lists and tuples and the values of dicts are
        inspected, too.

    Returns
    -------
    set of str
        Names of the modules to import, as from `known_module`.
    """
    found: set[str] = set()
    seen: set[int] = set()
    waiting = deque(called)
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.popleft()
        if id(value) not in seen:
            seen.add(id(value))
            # A user's object may raise errors when it is inspected; the call may still work.
            with contextlib.suppress(Exception):
                waiting.extend(_looked_at(value, found))
    return found


def _looked_at(value: Any, found: set[str]) -> Iterable[Any]:
    """Return the objects that a value refers to; add known modules to `found`."""
    # A proxy object may import modules when its __class__ is read; type() does not read it.
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
            # The function may import this module, or use an attribute of the same name.
            _is_known(name, found)
    for part in code.co_consts:
        if type(part) is CodeType:
            further += _of_code(part, names, found)
    return further


def _home(name: str | None) -> list[ModuleType]:
    module = sys.modules.get(name or "")
    return [] if module is None or name == "__main__" else [module]


def _is_users(names: Mapping[str, Any]) -> bool:
    """Return whether a module is neither compiled nor in the standard library."""
    package = str(names["__name__"]).partition(".")[0]
    path = names.get("__file__")
    is_python = isinstance(path, str) and path.endswith((".py", ".pyc"))
    return is_python and package not in sys.stdlib_module_names


def _is_near(names: Mapping[str, Any], package: str) -> bool:
    """Return whether a module belongs to the given package, or to no installed package."""
    if str(names.get("__name__", "")).partition(".")[0] == package:
        return True
    return not any(folder in str(names.get("__file__")) for folder in _INSTALLED)


def _is_known(name: str, found: set[str]) -> bool:
    """Return whether a module belongs to a known package; add the module to import to `found`."""
    imported = known_module(name)
    if imported is None:
        return False
    found.update([imported] if imported else [])
    return True
