"""Backends that are not ours: anything with ``run`` and ``num_processes``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_estimators.exceptions import HvdEstimatorsError, ParamError
from hvd_estimators.launch.backend import Backend

__all__ = ["as_backend"]


def as_backend(given: Any) -> Backend:
    """Return a backend that runs functions as the given object does. Runs on the driver.

    Parameters
    ----------
    given : object
        A `Backend`, or an object with ``run(fn, args, kwargs, env)``, which returns the ranks'
        results in the order of the ranks, and ``num_processes()``. Such a one may call the
        function in this process.

    Raises
    ------
    ParamError
        If it has no such methods.
    """
    if isinstance(given, Backend):
        return given
    for method in ("run", "num_processes"):
        # A class has the methods, too, and no number of ranks.
        if isinstance(given, type) or not callable(getattr(given, method, None)):
            raise ParamError(
                "backend: expected an object with run(fn, args, kwargs, env) and num_processes(), "
                f"found {given!r}."
            )
    return _Foreign(given)


class _Foreign(Backend):
    def __init__(self, given: Any) -> None:
        self._given = given

    def num_processes(self) -> int:
        count = self._given.num_processes()
        if not isinstance(count, int) or count < 1:
            raise ParamError(
                f"backend: num_processes() of {self._given!r} returned {count!r}; expected the "
                "number of ranks."
            )
        return count

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        results = self._given.run(fn, args=args, kwargs=dict(kwargs or {}), env=dict(env or {}))
        if not isinstance(results, Sequence) or len(results) != self.num_processes():
            found = f"{len(results)} results" if isinstance(results, Sequence) else repr(results)
            raise HvdEstimatorsError(
                f"backend: run() of {self._given!r} returned {found}; expected a list of what each "
                f"of its {self.num_processes()} ranks returned."
            )
        return list(results)
