"""The two packages that publish Lightning 2, with classes and patches that work with either.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code in different classes. Each
Trainer accepts only classes from its own package. Therefore this package derives its classes from
the placeholder base classes of this module, and `of_flavor` makes them for the package of the
user's objects.

The placeholder base classes are empty, so that importing a derived class imports neither Lightning
package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.exceptions import DependencyError, ParamError

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _ResultCollection as ResultCollection,
    )
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment
else:

    def _placeholder(name: str, path: str) -> type:
        return type(name, (), {"__module__": __name__, "lightning_base": path})

    Callback = _placeholder("Callback", "Callback")
    Checkpoint = _placeholder("Checkpoint", "callbacks.Checkpoint")
    CheckpointIO = _placeholder("CheckpointIO", "fabric.plugins.CheckpointIO")
    ClusterEnvironment = _placeholder("ClusterEnvironment", "fabric.plugins.ClusterEnvironment")
    LightningModule = _placeholder("LightningModule", "LightningModule")
    ParallelStrategy = _placeholder("ParallelStrategy", "strategies.ParallelStrategy")
    ResultCollection = _placeholder(
        "ResultCollection", "trainer.connectors.logger_connector.result._ResultCollection"
    )

__all__ = [
    "FLAVORS",
    "Callback",
    "Checkpoint",
    "CheckpointIO",
    "ClusterEnvironment",
    "Flavor",
    "LightningModule",
    "ParallelStrategy",
    "ResultCollection",
    "default_flavor",
    "flavor_of",
    "imported_flavors",
    "is_library",
    "is_lightning",
    "of_any_flavor",
    "of_flavor",
    "one_flavor",
    "patch_attribute",
    "patch_method",
]

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
        """Return a class or function by path: ``loggers.Logger`` or ``fabric.plugins.X``."""
        home, _, name = f"{self.name}.{path}".rpartition(".")
        if path.startswith("fabric."):
            home = self.fabric + home.removeprefix(f"{self.name}.fabric")
        return getattr(importlib.import_module(home), name)

    @property
    def is_installed(self) -> bool:
        """True if the package can be imported."""
        return importlib.util.find_spec(self.name.partition(".")[0]) is not None


FLAVORS = (
    Flavor("lightning.pytorch", "lightning.fabric"),
    Flavor("pytorch_lightning", "lightning_fabric"),
)


def imported_flavors() -> list[Flavor]:
    """Return the packages that this process has imported."""
    return [flavor for flavor in FLAVORS if sys.modules.get(flavor.name) is not None]


def default_flavor() -> Flavor:
    """Return the package to use if the user's objects belong to neither package.

    Raises
    ------
    DependencyError
        If neither package is installed.
    """
    imported = imported_flavors()
    if imported:
        return imported[0]
    for flavor in FLAVORS:
        if flavor.is_installed:
            return flavor
    raise DependencyError(
        "hvd_estimators.lightning needs Lightning, which is not installed. "
        f"Run: {INSTALL['lightning']}"
    )


def flavor_of(given: Any) -> Flavor | None:
    """Return the package that an object or class is derived from; None if neither."""
    kind = given if isinstance(given, type) else type(given)
    for base in kind.__mro__:
        for flavor in FLAVORS:
            if base.__module__.startswith((f"{flavor.name}.", f"{flavor.fabric}.")):
                return flavor
    return None


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
    if flavor is None:
        return False
    kind = given if isinstance(given, type) else type(given)
    return issubclass(kind, flavor.get(path))


def one_flavor(named: Iterable[tuple[str, Any]]) -> Flavor:
    """Return the package that the objects belong to, or the default if they belong to neither.

    Parameters
    ----------
    named : iterable of (str, object)
        Objects or classes, with their names for the error message.

    Raises
    ------
    ParamError
        If the objects come from both packages.
    """
    by_flavor: dict[Flavor, str] = {}
    for name, given in named:
        flavor = flavor_of(given)
        if flavor is not None:
            kind = given if isinstance(given, type) else type(given)
            by_flavor.setdefault(flavor, f"{name} ({kind.__name__})")
    if len(by_flavor) > 1:
        (first, name), (second, other_name) = by_flavor.items()
        raise ParamError(
            f"{name} comes from the package {first.name}, and {other_name} from "
            f"{second.name}. Their classes do not work together: import both from {first.name}, or "
            f"both from {second.name}."
        )
    return next(iter(by_flavor)) if by_flavor else default_flavor()


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

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(
            __module__=kind.__module__,
            __qualname__=kind.__qualname__,
            __doc__=kind.__doc__,
            lightning_flavor=flavor,
        )

    return types.new_class(kind.__name__, (kind, base), exec_body=fill)


@functools.cache
def of_any_flavor(kind: Any) -> Any:
    """Return a class for either package; the first Trainer of an object determines the package."""

    class Undecided(kind):
        # A Trainer reads these attributes before it sets the strategy's accelerator.
        _accelerator = _checkpoint_io = _precision_plugin = None
        cluster_environment = parallel_devices = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._arguments = args, kwargs

        @property
        def accelerator(self) -> None:
            return None

        @accelerator.setter
        def accelerator(self, given: Any) -> None:
            flavor = flavor_of(given)
            assert flavor is not None, given
            args, kwargs = self.__dict__.pop("_arguments")
            self.__class__ = of_flavor(kind, flavor)
            self.__init__(*args, **kwargs)  # type: ignore[misc]
            self.accelerator = given

    Undecided.__name__ = Undecided.__qualname__ = kind.__name__
    for flavor in FLAVORS:
        flavor.get("strategies.Strategy").register(Undecided)
    return Undecided


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
    return patch_attribute(owner, name, _Wrapper(getattr(owner, name), before, after))


class _Wrapper:
    """Method with calls before and after it; copies and pickles contain only the method."""

    def __init__(self, method: Any, before: Any, after: Any) -> None:
        self._method, self._before, self._after = method, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            self._before()
        returned = self._method(*args, **kwargs)
        if self._after is not None:
            self._after()
        return returned

    def __reduce__(self) -> Any:
        # Pickle the object and the method's name, because the object's state may not be restored
        # yet.
        return getattr, (self._method.__self__, self._method.__name__)
