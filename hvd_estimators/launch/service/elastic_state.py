"""State of an elastic job: rank 0 commits it to the driver, and later ranks restore it.

The driver keeps states in memory.

Horovod's own elastic mode keeps the surviving ranks, and a notification manager in each rank
triggers a new rendezvous. Here all ranks of a job are relaunched instead. `StateKeeper` replaces
the manager and registers each state. On rank 0, it sends the values that a state saves to the
driver. In relaunched ranks, it restores the last saved values before the function under
``hvd.elastic.run`` starts.

Runs in the rank, except for `CommitStore`, which runs on the driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from hvd_estimators._util.unpickle_imports import loads
from hvd_estimators.exceptions import StoreError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank.worker import NoNotifications, call_with
from hvd_estimators.launch.rendezvous.channel import Channel
from hvd_estimators.launch.service.server import SERVICE_VARIABLE, DriverService, connect_to_driver

# The length of a message has four bytes.
_MOST_BYTES = 2**32 - 2**10

logger = logging.getLogger(__name__)


class CommitStore:
    """The last commits of a job's states. Runs on the driver.

    Attributes
    ----------
    count : int
        Number of commits so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._states: dict[int, bytes] = {}

    @contextlib.contextmanager
    def serve(self, service: DriverService) -> Iterator[None]:
        """Serve the ranks of one launch until the block ends.

        All ranks fetch the commits made before this launch, one rank at a time, because they share
        the driver's network. Commits that arrive after the launch are lost.

        Parameters
        ----------
        service : DriverService
            The launch's service.
        """
        received: dict[int, bytes] = {}
        lock, sending = threading.Lock(), threading.Lock()

        def fetch(channel: Channel, request: Mapping[str, Any], _: bytes) -> None:
            with sending:
                _send(channel, {}, self._states.get(request["state"], b""))

        def commit(channel: Channel, request: Mapping[str, Any], _: bytes) -> None:
            state = _receive(channel)
            with lock:
                received[request["state"]] = state
                self.count += 1
            _send(channel, {})

        service.add_handler("fetch", fetch)
        service.add_handler("commit", commit)
        try:
            yield
        finally:
            self._states |= received


def _send(channel: Channel, message: Mapping[str, Any], state: bytes = b"") -> None:
    channel.send(message, state, timeouts.COMMIT_MESSAGE)


def _receive(channel: Channel) -> bytes:
    return channel.receive(timeouts.COMMIT_MESSAGE, timeouts.COMMIT_MESSAGE, _MOST_BYTES)[1]


def commit(address: str, state: int, value: Any) -> None:
    """Send a state to the driver, and return when it is stored there. Runs in the rank.

    Parameters
    ----------
    address : str
        Address of the driver's service.
    state : int
        The state's number in the job.
    value
        The state's values, sent with cloudpickle.

    Raises
    ------
    StoreError
        If the state is too large for a message.
    OSError
        If the driver cannot be reached. The rank then ends, and a relaunch covers it.
    """
    pickled = cloudpickle.dumps(value)
    if len(pickled) > _MOST_BYTES:
        raise StoreError(
            f"The committed state has {len(pickled) / 2**30:.1f} GiB, and the driver takes less "
            "than 4 GiB. Save large values in a file that all machines share, and commit its path."
        )
    with connect_to_driver(address, timeouts.COMMIT_MESSAGE) as channel:
        _send(channel, {"kind": "commit", "state": state})
        _send(channel, {}, pickled)
        _receive(channel)


def fetch(address: str, state: int) -> Any:
    """Return a state's last commit before this launch, or None if there is none.

    Runs in the rank. It has the parameters and errors of `commit`.
    """
    with connect_to_driver(address, timeouts.COMMIT_MESSAGE) as channel:
        _send(channel, {"kind": "fetch", "state": state})
        pickled = channel.receive(timeouts.FETCH_TURN, timeouts.COMMIT_MESSAGE, _MOST_BYTES)[1]
    return loads(pickled) if pickled else None


# Prefixes of the attributes with saved values in states and their handlers. TensorFlowState uses
# the second.
_SAVED = ("_saved", "_values")


def run_in_rank(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], relaunches: int
) -> Any:
    """Call the user's function, a program for ``horovod.elastic`` or ``torchrun``.

    Parameters
    ----------
    fn, args, kwargs
        The call.
    relaunches : int
        Number of relaunches of the job's ranks so far.
    """
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(relaunches)
    is_first = os.environ["HOROVOD_RANK"] == "0"
    keeper = StateKeeper(os.environ[SERVICE_VARIABLE], is_first, relaunches > 0)
    return call_with(keeper, fn, args, kwargs)


class StateKeeper(NoNotifications):
    """Notification manager that preserves the states of ``horovod.elastic`` beyond their ranks.

    Parameters
    ----------
    address : str
        Address of the driver's service.
    sends : bool
        Whether this rank sends its commits. True for rank 0, whose values all ranks use.
    is_relaunch : bool
        Whether to restore the previous commits.
    """

    def __init__(self, address: str, sends: bool, is_relaunch: bool) -> None:
        self._address = address
        self._sends = sends
        self._is_relaunch = is_relaunch
        self._states: list[Any] = []

    def register_listener(self, state: Any) -> None:
        """Commit and restore a state from now on; called before ranks synchronize it."""
        if any(state is registered for registered in self._states):
            return
        number = len(self._states)
        self._states.append(state)
        restore = state.restore
        if self._is_relaunch:
            saved = fetch(self._address, number)
            if saved is not None:
                _restore_saved(state, saved)
                restore()
            # As in a rank that has survived another: calls the reset callbacks that the user has
            # set.
            state.on_reset()
        state.restore = _leaving(restore)
        if self._sends:
            state.save = self._sending(state, number)

    def _sending(self, state: Any, number: int) -> Callable[[], None]:
        save = state.save

        def save_and_send() -> None:
            save()
            commit(self._address, number, _saved_by(state))

        return save_and_send


def _leaving(restore: Callable[[], None]) -> Callable[[], None]:
    """Return a replacement for ``restore`` that ends the rank if a peer is lost."""

    def restore_or_leave() -> None:
        from horovod.common.exceptions import HorovodInternalError

        error = sys.exc_info()[1]
        if isinstance(error, HorovodInternalError):
            raise error
        restore()

    return restore_or_leave


def _objects_with_values(state: Any) -> dict[str, Any]:
    """Return the objects with a state's saved values: the state and a TorchState's handlers."""
    return {"": state, **getattr(state, "_handlers", {})}


def _saved_by(state: Any) -> dict[str, dict[str, Any]]:
    """Return a state's saved values, without copying them."""
    saved = {
        name: {key: value for key, value in vars(object_).items() if key.startswith(_SAVED)}
        for name, object_ in _objects_with_values(state).items()
    }
    if not any(saved.values()):
        logger.warning(
            "%s saves no values that can be sent to the driver: relaunched ranks restart it.",
            type(state).__name__,
        )
    return saved


def _restore_saved(state: Any, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace a state's saved values; the state's `restore` then applies them."""
    for name, object_ in _objects_with_values(state).items():
        vars(object_).update(saved.get(name, {}))
