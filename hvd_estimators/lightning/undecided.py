"""A strategy that is made before it is known which of Lightning's packages its Trainer is of."""

from __future__ import annotations

import functools
from typing import Any

from hvd_estimators.lightning.flavor import FLAVORS, flavor_of, of_flavor

__all__ = ["of_any_flavor"]


@functools.cache
def of_any_flavor(kind: Any) -> Any:
    """Return a class of which Trainers of both packages accept an object, once."""

    class Undecided(kind):
        # What a Trainer looks at before it gives the strategy its accelerator.
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
