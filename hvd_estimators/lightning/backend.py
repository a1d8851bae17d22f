"""Backends that are not ours: anything with ``run`` and ``num_processes``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_estimators.exceptions import ParamError
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
        if not callable(getattr(given, method, None)):
            raise ParamError(
                "backend: expected an object with run(fn, args, kwargs, env) and num_processes(), "
                f"found {given!r}."
            )
    return _Foreign(given)


class _Foreign(Backend):
    def __init__(self, given: Any) -> None:
        self._given = given

    def num_processes(self) -> int:
        return int(self._given.num_processes())

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        results = self._given.run(fn, args=args, kwargs=dict(kwargs or {}), env=dict(env or {}))
        return list(results)
