"""Cache of predictors in an executor's Python worker, across tasks. Imports no framework."""

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
    """Remove import finders, so the worker's next task rereads fewer archives.

    PySpark before 4.1 calls ``importlib.invalidate_caches`` at the start of each task. Python then
    rereads an archive's whole list of files for each of its folders that modules were imported
    from. ``pyspark.zip`` has a dozen such folders; that takes 60 ms, and a task's rows may take
    only 20 ms. Python recreates finders of folders when it needs them, from the list that the
    archive's own finder keeps up to date.

    Finders of Java archives are removed, too. Spark has one Java archive in ``PYTHONPATH``, which
    is then reread only at the next import. The archives of a running JVM do not change.

    Parameters
    ----------
    finders : mapping, optional
        Path to finder. Default: ``sys.path_importer_cache``, the finders of this process.
    """
    finders = sys.path_importer_cache if finders is None else finders
    for path, finder in list(finders.items()):
        if not isinstance(finder, zipimporter):
            continue
        is_folder = bool(finder.prefix) and finder.archive in finders
        if is_folder or finder.archive.endswith(_OF_JAVA):
            del finders[path]


def predictor_key(hashed: Hashed, load: Callable[[Payload], Predictor]) -> str:
    """Return the predictor's cache key: a digest of the payload and of ``load``.

    Models with different settings make different predictors from one payload. Therefore ``load``
    is pickled with all objects that it refers to.
    """
    return hashlib.sha256(hashed.digest.encode() + cloudpickle.dumps(load)).hexdigest()


# A Python worker serves many tasks, and unpickles a model only once.
_predictors: dict[tuple[str, Resources], Predictor] = {}


def cached_predictor(
    key: str,
    model: Sent,
    load: Callable[..., Predictor],
    resources: Resources = FRAMEWORKS_CHOICE,
) -> Predictor:
    """Return the predictor with a key, and load it if the worker has no predictor with that key.

    The worker caches only one predictor.

    Parameters
    ----------
    key : str
        The cache key, see `predictor_key`.
    model : Sent
        The payload.
    load : callable
        Makes a predictor from the payload, or from the payload and the resources.
    resources : Resources
        Resources of the task. Different resources need a different predictor.
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
    # PySpark collects garbage after each task. The collector would scan all objects of an imported
    # framework each time, for 100 ms or more. Objects that live as long as the predictor are frozen
    # until another predictor replaces it.
    gc.collect()
    gc.freeze()
    return made


def _takes_resources(load: Callable[..., Predictor]) -> bool:
    """Return whether a function takes resources; the function of a custom model may not."""
    try:
        inspect.signature(load).bind(b"", FRAMEWORKS_CHOICE)
    except TypeError:
        return False
    return True
