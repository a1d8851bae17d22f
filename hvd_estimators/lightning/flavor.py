"""The two packages in which Lightning 2 is published, and our classes that work with either.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code in different classes, and each
Trainer accepts those of its own package only. What we derive from a class of Lightning's is written
once, on a stand-in of `bases`, and made for the package of the user's objects by `of_flavor`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.remedies import INSTALL

__all__ = [
    "FLAVORS",
    "Flavor",
    "default_flavor",
    "flavor_of",
    "imported_flavors",
    "is_lightning",
    "of_flavor",
    "one_flavor",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Flavor:
    """One of the packages.

    Attributes
    ----------
    name : str
        The package with Trainer and LightningModule, as it is imported.
    fabric : str
        The package beside it that holds what the Trainer shares with Fabric.
    """

    name: str
    fabric: str

    def get(self, path: str) -> Any:
        """Return a class or function: ``loggers.Logger`` or ``fabric.plugins.X``."""
        home, _, name = f"{self.name}.{path}".rpartition(".")
        if path.startswith("fabric."):
            home = self.fabric + home.removeprefix(f"{self.name}.fabric")
        return getattr(importlib.import_module(home), name)

    @property
    def is_imported(self) -> bool:
        """Whether this process has imported it."""
        return sys.modules.get(self.name) is not None

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported."""
        return importlib.util.find_spec(self.name.partition(".")[0]) is not None


FLAVORS = (
    Flavor("lightning.pytorch", "lightning.fabric"),
    Flavor("pytorch_lightning", "lightning_fabric"),
)


def imported_flavors() -> list[Flavor]:
    """Return the packages that this process has imported."""
    return [flavor for flavor in FLAVORS if flavor.is_imported]


def default_flavor() -> Flavor:
    """Return the package to use if none of the user's objects belongs to one.

    Raises
    ------
    DependencyError
        If none is installed.
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
    """Return the package that an object, or a class, is derived from; None if from none."""
    kind = given if isinstance(given, type) else type(given)
    for base in kind.__mro__:
        for flavor in FLAVORS:
            if base.__module__.startswith((f"{flavor.name}.", f"{flavor.fabric}.")):
                return flavor
    return None


def is_lightning(given: Any, path: str) -> bool:
    """Return whether an object, or a class, is of a kind of Lightning's, in either package.

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
    """Return the package that all objects belong to; the default one if none belongs to any.

    Parameters
    ----------
    named : iterable of (str, object)
        Objects or classes, with what they are called in the error.

    Raises
    ------
    ParamError
        If they come from both packages.
    """
    found: dict[Flavor, str] = {}
    for name, given in named:
        flavor = flavor_of(given)
        if flavor is not None:
            kind = given if isinstance(given, type) else type(given)
            found.setdefault(flavor, f"{name} ({kind.__name__})")
    if len(found) > 1:
        (first, one), (second, other) = found.items()
        raise ParamError(
            f"{one} comes from the package {first.name}, and {other} from {second.name}. Their "
            f"classes do not work together: import both from {first.name}, or both from "
            f"{second.name}."
        )
    return next(iter(found)) if found else default_flavor()


@functools.cache
def of_flavor(kind: type[T], flavor: Flavor) -> type[T]:
    """Return a class of ours, written on a stand-in of `bases`, derived from Lightning's class.

    Parameters
    ----------
    kind : type
        The class; its ``lightning_base`` says what it is derived from.
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
