"""The backend interface: an object that runs a function once per rank."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_estimators.launch.service.events import Handler
    from hvd_estimators.store import Store

__all__ = ["Backend"]


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

    def driver_host(self) -> str:
        """Return the address at which ranks reach the driver."""
        return "127.0.0.1"

    def task_slots(self) -> int | None:
        """Return the number of ranks that can run at the same time now, or None if unknown."""
        return None

    def resized(self, num_proc: int) -> Backend | None:
        """Return a similar backend with another number of ranks, or None if not supported."""
        return None
