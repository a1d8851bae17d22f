"""Which store serves a path: a scheme to a class, which packages built on this one can add to."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

from hvd_estimators.exceptions import ParamError

__all__ = ["ENTRY_POINTS", "register_store", "registered_schemes", "scheme_of", "store_class"]

ENTRY_POINTS = "hvd_estimators.stores"
"""Group of entry points; the name of each is a scheme, and its value a class of stores."""

# Names, not classes: a store's module is imported when it is asked for.
_stores: dict[str, type[Any] | str] = {
    "": "hvd_estimators.store.local:LocalStore",
    "file": "hvd_estimators.store.local:LocalStore",
    "memory": "hvd_estimators.store.filesystem:FilesystemStore",
}


def register_store(scheme: str, store: type[Any] | str) -> None:
    """Let `Store.create` make stores of a class where a prefix has a scheme.

    A package can do so without being imported, too, by an entry point of the group
    ``hvd_estimators.stores``. Runs on the driver: ranks get the store as it is.

    Parameters
    ----------
    scheme : str
        What stands before the colon, as in ``s3``. What was registered for it before is replaced.
    store : type or str
        A class derived from `Store`, or where to import it from, as ``"package.module:Class"``.
        `FilesystemStore` serves every filesystem that fsspec knows and Spark writes to.
    """
    _stores[scheme.lower()] = store


def registered_schemes() -> list[str]:
    """Return the schemes for which there is a store, in alphabetical order."""
    found = metadata.entry_points(group=ENTRY_POINTS)
    return sorted({*filter(None, _stores), *(entry.name.lower() for entry in found)})


def scheme_of(path: str) -> str:
    """Return a path's scheme in lower case; empty for a path without one.

    One letter is no scheme but a drive, and ``file:/data`` has one without two slashes, too.
    """
    match = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/", path)
    return match[1].lower() if match else ""


def store_class(path: str) -> type[Any]:
    """Return the class of the store that serves a path.

    Raises
    ------
    ParamError
        If no store is registered for its scheme.
    """
    scheme = scheme_of(path)
    store = _stores.get(scheme)
    if store is None:
        entries = metadata.entry_points(group=ENTRY_POINTS)
        entry = next((entry for entry in entries if entry.name.lower() == scheme), None)
        if entry is None:
            raise ParamError(
                f"prefix_path: there is no store for the scheme {scheme!r}, found {path!r}. Set a "
                f"path without a scheme or with one of: {', '.join(registered_schemes())}. For "
                "another filesystem of fsspec, which Spark writes to as well, call "
                f"hvd_estimators.store.register_store({scheme!r}, FilesystemStore) first."
            )
        store = _stores[scheme] = entry.load()
    if isinstance(store, str):
        module, _, name = store.partition(":")
        store = _stores[scheme] = getattr(importlib.import_module(module), name)
    return store
