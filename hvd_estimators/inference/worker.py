"""Predictors in an executor's Python worker: resources, and a cache across tasks.

Imports no framework and no PySpark.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import sys
from collections.abc import Callable, MutableMapping
from typing import Any
from zipimport import zipimporter

import cloudpickle

from hvd_estimators.inference.batch import Predictor
from hvd_estimators.inference.broadcast import Hashed, Sent, received
from hvd_estimators.inference.errors import naming_missing_modules
from hvd_estimators.inference.payload import Payload
from hvd_estimators.inference.resources import FRAMEWORKS_CHOICE, Resources

__all__ = ["Payload", "Predictor", "cached_predictor", "forget_archives", "predictor_key"]

_OF_JAVA = ".jar"


def forget_archives(finders: MutableMapping[str, Any] | None = None) -> None:
    """Let the next task's worker read fewer archives again.

    PySpark before 4.1 calls ``importlib.invalidate_caches`` at the beginning of each task, and of
    each folder in an archive that modules were imported from (a dozen in ``pyspark.zip``) Python
    then reads the archive's whole list of files: 60 ms, where a task's rows may take 20. Python
    makes the finders again where it needs them, from the list that the archive's own finder keeps
    up to date. Java's archives, of which Spark has one in ``PYTHONPATH``, are not looked at again
    before something is imported: a running JVM's do not change.

    Parameters
    ----------
    finders : mapping, optional
        Path to finder. Default: those of this process, ``sys.path_importer_cache``.
    """
    finders = sys.path_importer_cache if finders is None else finders
    for path, finder in list(finders.items()):
        if not isinstance(finder, zipimporter):
            continue
        is_folder = bool(finder.prefix) and finder.archive in finders
        if is_folder or finder.archive.endswith(_OF_JAVA):
            del finders[path]


def predictor_key(hashed: Hashed, load: Callable[[Payload], Predictor]) -> str:
    """Return what tells a predictor from others: a digest of all that it is made of.

    Of one document, models with other settings make other predictors: ``load`` is pickled with all
    that it refers to.
    """
    return hashlib.sha256(hashed.digest.encode() + cloudpickle.dumps(load)).hexdigest()


# Python workers serve many tasks: a model is unpickled once in each of them.
_predictors: dict[tuple[str, Resources], Predictor] = {}


def cached_predictor(
    key: str,
    model: Sent,
    load: Callable[..., Predictor],
    resources: Resources = FRAMEWORKS_CHOICE,
) -> Predictor:
    """Return the predictor with a key, made now where the worker has another one or none.

    Parameters
    ----------
    key : str
        See `predictor_key`.
    model : Sent
        The document.
    load : callable
        Makes a predictor of the document, or of this and the resources.
    resources : Resources
        What the task has. With others a predictor is another one.
    """
    forget_archives()
    found = _predictors.get((key, resources))
    if found is not None:
        return found
    gc.unfreeze()
    _predictors.clear()
    with received(model) as document, naming_missing_modules():
        made = load(document, resources) if _takes_resources(load) else load(document)
        _predictors[key, resources] = made
    forget_archives()
    # PySpark collects garbage after each task, and looks at all objects of an imported framework
    # each time, for 100 ms and more. What lives as long as the predictor is set aside until another
    # one comes.
    gc.collect()
    gc.freeze()
    return made


def _takes_resources(load: Callable[..., Predictor]) -> bool:
    """Return whether a function takes them; that of a user's own kind of model may not."""
    try:
        inspect.signature(load).bind(b"", FRAMEWORKS_CHOICE)
    except TypeError:
        return False
    return True
