"""The launches of a fit's ranks: each is told what it is to do. Runs on the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.events.stream import Handler
from hvd_estimators.store.fence import Fence
from hvd_estimators.training.handover import Handover, StoredCall, Trainer, train_stored
from hvd_estimators.training.spec import TrainSpec

if TYPE_CHECKING:
    from hvd_estimators.store import Store

__all__ = ["Launch", "warming_up"]


@dataclass
class Launch:
    """Launches the ranks of a fit; called with a backend, once or several times.

    Attributes
    ----------
    handover : Handover
        Holds what they are told.
    train : callable
        What every rank calls.
    spec_for : callable
        Returns what ranks are told, given how many of them there are.
    spec : TrainSpec
        What the ranks of the current launch are told.
    call : StoredCall
        The same, where they read it.
    env : mapping
        Their environment variables.
    handler : callable
        Gets what they report.
    fence : callable
        Returns what keeps ranks of earlier launches from the run, given the launch's number.
    number : int
        How many launches there have been.
    """

    handover: Handover
    train: Trainer
    spec_for: Callable[[int], TrainSpec]
    spec: TrainSpec
    call: StoredCall
    env: Mapping[str, str | None]
    handler: Handler
    fence: Callable[[int], Fence | None] = lambda launch: None
    number: int = 0

    def __call__(self, backend: Backend) -> list[Any]:
        """Return what the ranks return."""
        num_ranks = backend.num_processes()
        if num_ranks != self.spec.data.num_ranks:
            self.spec = self.spec_for(num_ranks)
            self.call = self.handover.put(self.train, self.spec)
        call = replace(self.call, fence=self.fence(self.number))
        self.number += 1
        return backend.run(
            train_stored,
            args=(call,),
            kwargs={},
            env=dict(self.env),
            on_event=self.handler,
        )


def warming_up(
    backend: Backend, train: Trainer, store: Store, env: Mapping[str, str | None]
) -> contextlib.AbstractContextManager[None]:
    """Let machines import the framework, in the block, that the ranks of a fit will need."""
    call = StoredCall(store, "", "", "", getattr(train, "__module__", ""))
    return backend.warming_up(train_stored, (call,), env)
