"""Unpickling: modules that must be imported first, and classes that must stay unchanged.

cloudpickle sends the classes of a notebook or script by value. Loading such a class in the process
that defines it would give the live class other methods, with a copy of the notebook's variables
for their globals. Here a class that the process defines stays as it is, and loaded objects are of
that class. A class that an earlier pickle brought is updated, as by cloudpickle.

Also a ``pickle_module`` for ``torch.load``.
"""

from __future__ import annotations

import importlib
import io
import pickle
import weakref
from collections.abc import Callable
from typing import IO, Any

from cloudpickle import cloudpickle

__all__ = ["Unpickler", "first_imports", "import_first", "load", "loads"]

_modules: list[str] = []


class _Import:
    """Pickles as the import of a module, which then takes its place."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self._module,)


def import_first(module: str) -> None:
    """Have ranks and Python workers import a module before they unpickle what is sent from here."""
    if module not in _modules:
        _modules.append(module)


def first_imports() -> tuple[Any, ...]:
    """Return what goes to the front of a tuple that is pickled for other processes.

    What is unpickled first is imported first. None, mostly; who unpickles the tuple counts its
    members from the end.
    """
    return tuple(map(_Import, _modules))


_MOVED = {
    "hvd_estimators.keras.learning_rate": "hvd_estimators.keras.callbacks",
    "hvd_estimators.keras.traits": "hvd_estimators.keras.model_metadata",
    "hvd_estimators.launch.foreign": "hvd_estimators.launch.foreign_backends",
    "hvd_estimators.launch.local": "hvd_estimators.launch.local_backend",
    "hvd_estimators.launch.spark": "hvd_estimators.launch.spark_backend",
    "hvd_estimators.lightning.exact": "hvd_estimators.lightning.weighted_strategy",
    "hvd_estimators.lightning.flavor": "hvd_estimators.lightning.package",
    "hvd_estimators.lightning.undecided": "hvd_estimators.lightning.package",
    "hvd_estimators.loading.readers.arrow": "hvd_estimators.loading.arrow",
    "hvd_estimators.loading.readers.base": "hvd_estimators.loading.reader",
    "hvd_estimators.loading.readers.petastorm": "hvd_estimators.loading.petastorm",
    "hvd_estimators.loading.readers.planned": "hvd_estimators.loading.reader",
    "hvd_estimators.loading.transformation": "hvd_estimators.loading.transform",
    "hvd_estimators.parquet.manifest": "hvd_estimators.data.manifest",
    "hvd_estimators.store.dbfs": "hvd_estimators.store.local",
    "hvd_estimators.torch.joint_loss": "hvd_estimators.torch.objective",
    "hvd_estimators.torch.outputs": "hvd_estimators.torch.tensors",
}
"""Former modules of classes in saved estimators and models, to their modules now (2026-11-25)."""

_RENAMED = {
    ("hvd_estimators.keras.model_metadata", "Traits"): "ModelMetadata",
    ("hvd_estimators.keras.optimizer_state", "OptimizerDocument"): "OptimizerPayload",
    ("hvd_estimators.keras.serialization", "ModelDocument"): "ModelPayload",
}
"""Their modules now and former names, to their names now."""

# Classes that exist because a pickle was loaded.
_received: weakref.WeakSet[type] = weakref.WeakSet()


class Unpickler(pickle.Unpickler):
    """Reads pickles; classes that this process defines stay as they are."""

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._kept: dict[int, type] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a class or function by its name; called by pickle."""
        module = _MOVED.get(module, module)
        name = _RENAMED.get((module, name), name)
        found = super().find_class(module, name)
        if found is cloudpickle._make_skeleton_class or found is cloudpickle._make_skeleton_enum:
            return lambda *args: self._make_class(found, args)
        if found is cloudpickle._class_setstate:
            return self._fill_class
        return found

    def _make_class(self, make: Callable[..., type], args: tuple[Any, ...]) -> type:
        # The tracker's id is followed by a single argument, which is for later versions.
        known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
        if known is not None and known not in _received:
            self._kept[id(known)] = known
            return known
        made = make(*args)
        _received.add(made)
        return made

    def _fill_class(self, cls: type, state: Any) -> type:
        return cls if id(cls) in self._kept else cloudpickle._class_setstate(cls, state)


def load(file: IO[bytes], **options: Any) -> Any:
    """Return the object that a file holds."""
    return Unpickler(file, **options).load()


def loads(document: bytes, **options: Any) -> Any:
    """Return the object that some bytes hold."""
    return load(io.BytesIO(document), **options)
