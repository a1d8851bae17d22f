"""What modules and callbacks of users hold in plain attributes: outputs of steps, counts.

Lightning's checkpoints have none of it, and at an epoch's end there is seldom anything left. Within
an epoch a module may have all losses so far in a list, which the end of the epoch takes the mean
of, and which its beginning has made: that is not called again where an epoch is gone on with.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torchmetrics import Metric

from hvd_estimators.lightning.flavor import FLAVORS, Flavor
from hvd_estimators.unpickling import Unpickler

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

__all__ = ["Attributes"]

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**24
_BOUND = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Of packages whose objects keep no such state, or keep it otherwise.
_OTHERS = ("torch.", "torchmetrics.", "hvd_estimators.")


class Attributes:
    """Takes down the attributes that have changed since training began, and sets them again.

    What is pickled refers to the module's parts, parameters, optimizers and the like by name, so
    that it goes on with those that there are. Left out is what cannot be pickled, or is large.

    Parameters
    ----------
    flavor : Flavor
        The Trainer's package.
    """

    def __init__(self, flavor: Flavor) -> None:
        self._inner = vars(flavor.get("LightningModule")()).keys()
        self._before: dict[tuple[str, str], Any] = {}
        self._told: set[tuple[str, str]] = set()

    def begin(self, trainer: Trainer) -> None:
        """Note what there is before training changes it."""
        names = _names(trainer)
        self._before = {
            place: _print_of(value, names) for place, value in self._attributes(trainer)
        }

    def changed(self, trainer: Trainer) -> bytes:
        """Return the attributes that are not what they were, pickled."""
        names = _names(trainer)
        found = {}
        for place, value in self._attributes(trainer):
            now = _print_of(value, names)
            if place in self._before and self._before[place] == now:
                continue
            if now is not None:
                found[place] = value
            elif place not in self._before and place not in self._told:
                self._told.add(place)
                logger.warning(
                    "%s of %s cannot be pickled, or has more than %d MiB. Checkpoints within an "
                    "epoch are without it: make it in on_train_start, or in __init__.",
                    place[1],
                    place[0].rstrip("."),
                    _MOST_BYTES >> 20,
                )
        # In one, so that what they share they share afterwards.
        return _pickled(found, names, limit=None)

    def restore(self, trainer: Trainer, document: bytes) -> None:
        """Set what `changed` returned."""
        objects = {name: value for value, name in _objects(trainer)}
        owners = dict(_owners(trainer))
        try:
            found = _Unpickler(io.BytesIO(document), objects).load()
        except Exception as error:
            logger.warning("Attributes that changed within the epoch are left out: %s", error)
            return
        for (owner, name), value in found.items():
            if owner in owners:
                vars(owners[owner])[name] = value

    def _attributes(self, trainer: Trainer) -> Iterator[tuple[tuple[str, str], Any]]:
        for owner, thing in _owners(trainer):
            for name, value in list(vars(thing).items()):
                if name not in self._inner:
                    yield (owner, name), value


def _owners(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the user's module, its parts, and the callbacks of the user's."""
    ours = (*_OTHERS, *(f"{n}." for flavor in FLAVORS for n in (flavor.name, flavor.fabric)))
    for name, part in trainer.lightning_module.named_modules():
        if not isinstance(part, Metric) and not type(part).__module__.startswith(ours):
            yield f"module.{name}", part
    callbacks: Any = trainer
    for index, callback in enumerate(callbacks.callbacks):
        if not type(callback).__module__.startswith(ours):
            yield f"callbacks.{index}", callback


def _objects(trainer: Trainer) -> Iterator[tuple[Any, str]]:
    """Yield what is referred to by name, not pickled."""
    module, given = trainer.lightning_module, trainer
    yield trainer, "trainer"
    yield trainer.strategy, "strategy"
    for name, part in module.named_modules():
        yield part, f"module.{name}"
    for name, parameter in module.named_parameters():
        yield parameter, f"parameter.{name}"
    for name, buffer in module.named_buffers():
        yield buffer, f"buffer.{name}"
    lists: Mapping[str, Any] = {
        "callbacks": given.callbacks,  # type: ignore[attr-defined]
        "loggers": trainer.loggers,
        "optimizers": trainer.optimizers,
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
    }
    for kind, things in lists.items():
        for index, thing in enumerate(things):
            yield thing, f"{kind}.{index}"


def _names(trainer: Trainer) -> dict[int, str]:
    return {id(value): name for value, name in _objects(trainer)}


def _print_of(value: Any, names: Mapping[int, str]) -> Any:
    """Return what tells whether a value has changed; None if it cannot be kept."""
    if isinstance(value, _PLAIN):
        return value, type(value)
    try:
        return hashlib.sha256(_pickled(value, names, _MOST_BYTES)).digest()
    except Exception:
        return None


def _pickled(value: Any, names: Mapping[int, str], limit: int | None) -> bytes:
    file = _Limited(limit)
    _Pickler(file, names).dump(value)
    return file.getvalue()


class _Limited(io.BytesIO):
    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self._limit is not None and self.tell() + memoryview(data).nbytes > self._limit:
            raise OverflowError(f"more than {self._limit} bytes")
        return super().write(data)


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> str | None:
        name = self._names.get(id(obj))
        if name is None and isinstance(obj, _BOUND):
            raise pickle.PicklingError("a copy would be of no use to what it works on")
        return name


class _Unpickler(Unpickler):
    def __init__(self, file: io.BytesIO, objects: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, name: Any) -> Any:
        return self._objects[name]
