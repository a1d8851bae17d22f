"""What a rank does for ``horovod.elastic``: states outlive it, and others begin where it ended.

Runs on the worker. Horovod's own elastic mode keeps the ranks that are left and lets them find each
other anew, told by a notification manager in each rank. Here all ranks of a job are launched again
instead, so that an object in the manager's place is told of each state, and does two things. It
lets rank 0 send what the state saves to the driver. And in ranks that were launched again it puts
back what was saved last, before the function that ``hvd.elastic.run`` wraps begins.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_estimators.launch.elastic.commits import COMMITS_VARIABLE, commit, fetch
from hvd_estimators.launch.rank.notifications import NoNotifications, call_with

__all__ = ["StateKeeper", "run_in_rank"]

logger = logging.getLogger(__name__)

# What states and their handlers name that which they save: TensorFlowState's is the second.
_SAVED = ("_saved", "_values")


def run_in_rank(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    relaunches: int,
) -> Any:
    """Call a function of the user's, a program for ``horovod.elastic``.

    Parameters
    ----------
    fn, args, kwargs
        The call.
    relaunches : int
        How often the job's ranks have been launched again.
    """
    is_first = os.environ["HOROVOD_RANK"] == "0"
    keeper = StateKeeper(os.environ[COMMITS_VARIABLE], is_first, relaunches > 0)
    return call_with(keeper, fn, args, kwargs)


class StateKeeper(NoNotifications):
    """Keeps the states of ``horovod.elastic`` beyond their ranks.

    Parameters
    ----------
    target : str
        Where commits are kept.
    sends : bool
        Whether this rank sends what it commits: rank 0, whose values all ranks take.
    is_relaunch : bool
        Whether to put back what was committed before.
    """

    def __init__(self, target: str, sends: bool, is_relaunch: bool) -> None:
        self._target = target
        self._sends = sends
        self._is_relaunch = is_relaunch
        self._states: list[Any] = []

    def register_listener(self, state: Any) -> None:
        """Take care of a state; called before ranks synchronise it."""
        if any(state is known for known in self._states):
            return
        number = len(self._states)
        self._states.append(state)
        restore = state.restore
        if self._is_relaunch:
            saved = fetch(self._target, number)
            if saved is not None:
                _put_back(state, saved)
                restore()
            # As where a rank has outlived another one: with the callbacks that the user has set.
            state.on_reset()
        state.restore = _leaving(restore)
        if self._sends:
            state.save = self._sending(state, number)

    def _sending(self, state: Any, number: int) -> Callable[[], None]:
        save = state.save

        def save_and_send() -> None:
            save()
            commit(self._target, number, _saved_by(state))

        return save_and_send


def _leaving(restore: Callable[[], None]) -> Callable[[], None]:
    """Return what Horovod calls in a rank whose peer is lost: the rank ends instead."""

    def restore_or_leave() -> None:
        from horovod.common.exceptions import HorovodInternalError

        error = sys.exc_info()[1]
        if isinstance(error, HorovodInternalError):
            raise error
        restore()

    return restore_or_leave


def _holders(state: Any) -> dict[str, Any]:
    """Return the objects that hold what a state has saved: itself, and a TorchState's handlers."""
    return {"": state, **getattr(state, "_handlers", {})}


def _saved_by(state: Any) -> dict[str, dict[str, Any]]:
    """Return what a state has saved, without copying it."""
    found = {
        name: {key: value for key, value in vars(holder).items() if key.startswith(_SAVED)}
        for name, holder in _holders(state).items()
    }
    if not any(found.values()):
        logger.warning(
            "%s saves nothing that is known here: ranks that are launched again begin it anew.",
            type(state).__name__,
        )
    return found


def _put_back(state: Any, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Let a state hold what was saved; its `restore` makes that its values."""
    for name, holder in _holders(state).items():
        vars(holder).update(saved.get(name, {}))
