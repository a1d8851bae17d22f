"""A worker's predictor: made of a document, and kept for the tasks that come. Runs on executors."""

from __future__ import annotations

import gc
import hashlib
import inspect
from collections.abc import Callable

import cloudpickle

from hvd_estimators.inference.documents import Document
from hvd_estimators.inference.failures import naming_missing_modules
from hvd_estimators.inference.import_finders import forget_archives
from hvd_estimators.inference.received import received
from hvd_estimators.inference.resources import FRAMEWORKS_CHOICE, Resources
from hvd_estimators.inference.shared import Hashed, Sent
from hvd_estimators.inference.steps import Predictor

__all__ = ["Document", "Predictor", "cached_predictor", "predictor_key"]


def predictor_key(hashed: Hashed, load: Callable[[Document], Predictor]) -> str:
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
