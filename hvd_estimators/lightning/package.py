"""The two packages that publish Lightning 2, with classes and patches that work with either.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code in different classes. Each
Trainer accepts only classes from its own package. Therefore this package derives its classes from
the placeholder base classes of this module, and `of_flavor` makes them for the package of the
user's objects. A class that derives from both would run the code of one package in the other's
Trainer.

The placeholder base classes are empty, so that importing a derived class imports neither Lightning
package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hvd_estimators.exceptions import ParamError

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch.callbacks import Checkpoint as Checkpoint
    from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
    from lightning_fabric.plugins import CheckpointIO as CheckpointIO
    from lightning_fabric.plugins.environments.lightning import (
        LightningEnvironment as LightningEnvironment,
    )
else:

    def _placeholder(name: str, path: str) -> type:
        return type(name, (), {"__module__": __name__, "lightning_base": path})

    Callback = _placeholder("Callback", "Callback")
    Checkpoint = _placeholder("Checkpoint", "callbacks.Checkpoint")
    CheckpointIO = _placeholder("CheckpointIO", "plugins.CheckpointIO")
    LightningEnvironment = _placeholder(
        "LightningEnvironment", "plugins.environments.LightningEnvironment"
    )
    DDPStrategy = _placeholder("DDPStrategy", "strategies.DDPStrategy")

T = TypeVar("T")


@dataclass(frozen=True)
class Flavor:
    """One of the two Lightning packages.

    Attributes
    ----------
    name : str
        The import name of the package with Trainer and LightningModule.
    fabric : str
        The related package with the code that the Trainer shares with Fabric.
    """

    name: str
    fabric: str

    def get(self, path: str) -> Any:
        """Return a class or function by its path in the package, such as ``loggers.Logger``."""
        home, _, name = f"{self.name}.{path}".rpartition(".")
        return getattr(importlib.import_module(home), name)


FLAVORS = (
    Flavor("lightning.pytorch", "lightning.fabric"),
    Flavor("pytorch_lightning", "lightning_fabric"),
)


def flavor_of(given: Any) -> Flavor | None:
    """Return the package that an object or class is derived from; None if neither."""
    for base in _kind(given).__mro__:
        for flavor in FLAVORS:
            if base.__module__.startswith((f"{flavor.name}.", f"{flavor.fabric}.")):
                return flavor
    return None


def _kind(given: Any) -> type:
    return given if isinstance(given, type) else type(given)


def is_lightning(given: Any, path: str) -> bool:
    """Return whether an object or class is derived from a Lightning class, in either package.

    Parameters
    ----------
    given : object
        The object or class.
    path : str
        For example ``callbacks.ModelCheckpoint``, see `Flavor.get`.
    """
    flavor = flavor_of(given)
    return flavor is not None and issubclass(_kind(given), flavor.get(path))


def averages_weights(callback: Any) -> bool:
    """Return whether a callback is one of Lightning's that average weights."""
    kinds = {base.__name__ for base in type(callback).__mro__}
    return not kinds.isdisjoint(("StochasticWeightAveraging", "WeightAveraging"))


def one_flavor(named: Iterable[tuple[str, Any]]) -> Flavor:
    """Return the package that the objects belong to, or the first if they belong to neither.

    Parameters
    ----------
    named : iterable of (str, object)
        Objects or classes, with their names for the error message.

    Raises
    ------
    ParamError
        If the objects come from both packages.
    """
    found: dict[Any, str] = {}
    for name, given in named:
        found.setdefault(flavor_of(given), f"{name} ({_kind(given).__name__})")
    found.pop(None, None)
    if len(found) > 1:
        (first, name), (second, other_name) = found.items()
        raise ParamError(
            f"{name} comes from the package {first.name}, and {other_name} from "
            f"{second.name}. Their classes do not work together: import both from {first.name}, or "
            f"both from {second.name}."
        )
    return next(iter(found), FLAVORS[0])


@functools.cache
def of_flavor(kind: type[T], flavor: Flavor) -> type[T]:
    """Return a class of this package, derived from the Lightning class that it names.

    Parameters
    ----------
    kind : type
        A class with a placeholder base class; its ``lightning_base`` is the path of the
        Lightning class.
    flavor : Flavor
        The package.
    """
    base = flavor.get(kind.lightning_base)  # type: ignore[attr-defined]
    copied = {name: getattr(kind, name) for name in ("__module__", "__doc__")}
    attributes = {"lightning_flavor": flavor, **copied}
    return types.new_class(kind.__name__, (kind, base), exec_body=lambda n: n.update(attributes))


def is_library(definition: Any) -> bool:
    """Return whether a class or function is defined by Lightning or by this package."""
    package = str(getattr(definition, "__module__", "")).partition(".")[0]
    return package in ("lightning", "pytorch_lightning", "hvd_estimators")


@contextlib.contextmanager
def patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object until the block ends, without the object's own setter."""
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


def patch_method(
    owner: Any,
    name: str,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Call a function before or after an object's method, until the block ends."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        returned = method(*args, **kwargs)
        if after is not None:
            after()
        return returned

    return patch_attribute(owner, name, call)
