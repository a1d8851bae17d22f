"""The backend interface: something that runs a function once per rank."""

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
    """Runs a function in one process per rank and returns what each rank returned.

    Subclass it to train elsewhere and pass an instance as ``backend``. Runs on the driver.
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
            Sent to the ranks with cloudpickle; may call ``horovod.<framework>.init()``.
        args, kwargs
            Its arguments.
        env : mapping, optional
            Environment variables of the ranks; None deletes one.
        on_event : callable, optional
            Called on the driver, from another thread, with what ranks report while they run: a
            `RankProgress`, `RankEpoch`, `RankMessage` or `RankOutput` at a time. Default: messages
            are printed, and what ranks print is shown on the driver, if the backend is to show it.

        Returns
        -------
        list
            One result per rank, in the order of the ranks.

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
        """Raise `SlotsError` if the ranks cannot run at the same time; by default does nothing."""

    def check_store(self, store: Store) -> None:  # noqa: B027 - not every backend can tell
        """Raise `StoreError` if ranks cannot see the store; by default does nothing."""

    def warming_up(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around what is done before ``fn(*args)`` is run on ranks.

        Machines may import what it needs meanwhile. By default does nothing.
        """
        return contextlib.nullcontext()

    def driver_host(self) -> str:
        """Return the address at which ranks reach the driver."""
        return "127.0.0.1"

    def task_slots(self) -> int | None:
        """Return how many ranks could run at the same time now; None if nobody can tell."""
        return None

    def resized(self, num_proc: int) -> Backend | None:
        """Return a backend like this one for another number of ranks; None if there is none."""
        return None
