"""Backend interface: run a function once per rank. Also adapts third-party backends."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import HvdEstimatorsError, ParamError

if TYPE_CHECKING:
    from hvd_estimators.launch.service.events import Handler
    from hvd_estimators.store import Store


class Backend(ABC):
    """Base class of backends, which run a function in one process per rank.

    To train elsewhere, subclass it and pass an instance as ``backend``. Runs on the driver.
    """

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: Handler | None = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank.

        Parameters
        ----------
        fn : callable
            Sent to the ranks with cloudpickle. It may call ``horovod.<framework>.init()``.
        args, kwargs
            Arguments of ``fn``.
        env : mapping, optional
            Environment variables of the ranks; None deletes a variable.
        on_event : callable, optional
            Called on the driver, from another thread, with one event of a running rank at a time: a
            `RankProgress`, `RankEpoch`, `RankMessage` or `RankOutput`. By default, messages are
            printed. The ranks' output is shown on the driver if the backend is configured to show
            it.

        Returns
        -------
        list
            One result per rank, in rank order.

        Raises
        ------
        SlotsError
            If the ranks cannot run at the same time.
        WorkerFailedError
            If a rank failed.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Return the number of ranks."""

    def check(self) -> None:  # noqa: B027 - not every backend can tell
        """Raise `SlotsError` if the ranks cannot run at the same time; by default, do nothing."""

    def check_horovod(self) -> None:  # noqa: B027 - not every backend can tell
        """Raise `DependencyError` if ranks cannot use Horovod; by default, do nothing."""

    def check_store(self, store: Store) -> None:  # noqa: B027 - not every backend can tell
        """Raise `StoreError` if the ranks cannot access the store; by default, do nothing."""

    def warming_up(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for the driver's work before ``fn(*args)`` runs on the ranks.

        During the block, machines may already import the modules that ``fn`` needs. By default,
        does nothing.
        """
        return contextlib.nullcontext()

    def task_slots(self) -> int | None:
        """Return the number of ranks that can run at the same time now, or None if unknown."""
        return None

    def resized(self, num_proc: int) -> Backend | None:
        """Return a similar backend with another number of ranks, or None if not supported."""
        return None


_OPTIONAL_METHODS = ("check", "check_horovod", "check_store", "warming_up", "task_slots")


def as_backend(given: Any) -> Backend:
    """Convert an object to a `Backend`. Runs on the driver.

    Parameters
    ----------
    given : object
        A `Backend`, or an object with the methods ``run(fn, args, kwargs, env)`` and
        ``num_processes()``. Its ``run`` returns the ranks' results in rank order, and may call the
        function in this process. The object may also define other methods of `Backend`. Only a
        `Backend` with ``run(on_event=...)`` reports progress and epochs, which loggers receive.

    Raises
    ------
    ParamError
        If the object lacks these methods.
    """
    for method in ("run", "num_processes"):
        # A class has these methods too, but not a number of ranks.
        if isinstance(given, type) or not callable(getattr(given, method, None)):
            raise ParamError(
                "backend: expected an object with run(fn, args, kwargs, env) and num_processes(), "
                f"found {given!r}."
            )
    if isinstance(given, Backend) and "on_event" in inspect.signature(given.run).parameters:
        return given
    return _Foreign(given)


class _Foreign(Backend):
    """Backend that calls an object of another class, with its methods in place of the defaults."""

    def __init__(self, given: Any) -> None:
        self._given = given
        for name in _OPTIONAL_METHODS:
            method = getattr(given, name, None)
            if method is not None:
                setattr(self, name, method)

    def num_processes(self) -> int:
        count = self._given.num_processes()
        if not isinstance(count, Integral) or count < 1:
            raise ParamError(
                f"backend: num_processes() of {self._given!r} returned {count!r}; expected the "
                "number of ranks."
            )
        return int(count)

    def resized(self, num_proc: int) -> Backend | None:
        other = getattr(self._given, "resized", super().resized)(num_proc)
        return None if other is None else as_backend(other)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: Handler | None = None,
    ) -> list[Any]:
        results = self._given.run(
            fn, args=tuple(args), kwargs=dict(kwargs or {}), env=dict(env or {})
        )
        if not isinstance(results, Sequence) or len(results) != self.num_processes():
            actual = f"{len(results)} results" if isinstance(results, Sequence) else repr(results)
            raise HvdEstimatorsError(
                f"backend: run() of {self._given!r} returned {actual}; expected a list with one "
                f"result for each of its {self.num_processes()} ranks."
            )
        return list(results)
