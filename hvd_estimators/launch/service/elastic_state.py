"""State of an elastic job: rank 0 commits it to the driver, and later ranks restore it.

States travel to the driver's service in parts of some megabytes, so that neither end holds a whole
state as bytes. The driver keeps states in unnamed files, which no other process can open and which
disappear with the driver's process.

Horovod's own elastic mode keeps the surviving ranks, and a notification manager in each rank
triggers a new rendezvous. Here all ranks of a job are relaunched instead. `StateKeeper` replaces
the manager and registers each state. On rank 0, it sends the values that a state saves to the
driver. In relaunched ranks, it restores the last saved values before the function under
``hvd.elastic.run`` starts.

Runs in the rank, except for `CommitStore`, which runs on the driver.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Self, TypeVar

import cloudpickle

from hvd_estimators._util.unpickle_imports import load
from hvd_estimators.exceptions import StoreError, UnreachableError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank.worker import NoNotifications, call_with
from hvd_estimators.launch.rendezvous.channel import AuthenticationError, Channel
from hvd_estimators.launch.service.server import (
    SERVICE_VARIABLE,
    DriverService,
    connect_to_driver,
)


class StatePickler(cloudpickle.Pickler):
    """Pickler that serializes torch tensors as NumPy arrays that share their memory.

    torch itself creates bytes for each tensor, and pickle keeps them until everything is written.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction of an object; called by pickle."""
        # Does not import torch: if there are tensors, torch is already imported.
        if (type(obj).__module__, type(obj).__qualname__) == ("torch", "Tensor"):
            array = _array_of(obj)
            if array is not None:
                return sys.modules["torch"].from_numpy, (array,)
        return super().reducer_override(obj)


def _array_of(tensor: Any) -> Any:
    """Return the array that shares a tensor's memory, or None if there is none."""
    if tensor.requires_grad or not tensor.is_contiguous():
        return None
    try:
        return tensor.numpy()
    # The tensor is on a GPU, sparse, or of a type that NumPy lacks.
    except (TypeError, RuntimeError):
        return None


_PART_BYTES = 4 * 2**20

T = TypeVar("T")

logger = logging.getLogger(__name__)


class CommitStore:
    """The last commits of a job's states. Runs on the driver; used as a context manager.

    Attributes
    ----------
    count : int
        Number of commits so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._files: dict[int, IO[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in self._files.values():
            file.close()

    @contextlib.contextmanager
    def serve(self, service: DriverService) -> Iterator[None]:
        """Serve the ranks of one launch until the block ends; ignore commits of earlier launches.

        All ranks fetch the commits made before this launch.

        Parameters
        ----------
        service : DriverService
            The launch's service.
        """
        launch_ended = threading.Event()
        before = dict(self._files)

        def fetch(channel: Channel, request: Mapping[str, Any], _: bytes) -> None:
            _send_file(channel, before.get(request["state"]))

        def commit(channel: Channel, request: Mapping[str, Any], _: bytes) -> None:
            self._receive(channel, request["state"], launch_ended)

        service.add_handler("fetch", fetch)
        service.add_handler("commit", commit)
        try:
            yield
        finally:
            with self._lock:
                launch_ended.set()

    def _receive(self, channel: Channel, state: int, launch_ended: threading.Event) -> None:
        """Receive a state; replace the previous one when the new one is complete."""
        file: IO[bytes] = _unnamed_file()
        problem = ""
        while True:
            message, body = _receive(channel)
            if message["kind"] == "end":
                break
            try:
                file.write(b"" if problem else body)
            except OSError as error:
                problem = str(error)
                file.close()
                file = io.BytesIO()
        try:
            file.flush()
        except OSError as error:
            problem = str(error)
        if problem:
            _send(channel, {"kind": "rejected", "why": f"{tempfile.gettempdir()}: {problem}"})
            return
        with self._lock:
            if launch_ended.is_set():
                return
            self._files[state] = file
            self.count += 1
        _send(channel, {"kind": "stored"})


def _unnamed_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="hvd-estimators-commit-")


def _send_file(channel: Channel, file: IO[bytes] | None) -> None:
    if file is None:
        _send(channel, {"kind": "none"})
        return
    _send(channel, {"kind": "state"})
    offset = 0
    # Other ranks read from the same file, so its position is not used.
    while part := os.pread(file.fileno(), _PART_BYTES, offset):
        _send(channel, {"kind": "part"}, part)
        offset += len(part)
    _send(channel, {"kind": "end"})


def _send(channel: Channel, message: Mapping[str, Any], body: bytes = b"") -> None:
    channel.send(message, body, timeouts.COMMIT_MESSAGE)


def _receive(channel: Channel) -> tuple[dict[str, Any], bytes]:
    return channel.receive(timeouts.COMMIT_MESSAGE, timeouts.COMMIT_MESSAGE)


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
        If the driver cannot store the state.
    UnreachableError
        If the driver cannot be reached.
    """

    def send(channel: Channel) -> None:
        _send(channel, {"kind": "commit", "state": state})
        # The buffer passes large arrays without copying them.
        parts = io.BufferedWriter(_Parts(channel), _PART_BYTES)
        StatePickler(parts, protocol=5).dump(value)
        parts.flush()
        _send(channel, {"kind": "end"})
        reply, _ = _receive(channel)
        if reply["kind"] != "stored":
            raise StoreError(
                f"The driver cannot store the committed state ({reply['why']}). Set TMPDIR on the "
                "driver to a folder with more space."
            )

    _converse(address, send)


def fetch(address: str, state: int) -> Any:
    """Return a state's last commit before this launch, or None if there is none.

    Runs in the rank. It has the parameters and errors of `commit`.
    """

    def receive(channel: Channel) -> Any:
        _send(channel, {"kind": "fetch", "state": state})
        reply, _ = _receive(channel)
        if reply["kind"] == "none":
            return None
        return load(io.BufferedReader(_Stream(channel), 2**20))

    return _converse(address, receive)


def _converse(address: str, conversation: Callable[[Channel], T]) -> T:
    """Communicate with the driver on a new connection; restart from the beginning if it breaks."""
    deadline = time.monotonic() + timeouts.COMMIT_RETRY
    while True:
        try:
            with connect_to_driver(address) as channel:
                return conversation(channel)
        except StoreError:
            raise
        except OSError as error:
            if isinstance(error, AuthenticationError) or time.monotonic() > deadline:
                host, port, _ = address.rsplit(":", 2)
                raise UnreachableError(
                    f"The driver, which stores the commits of ranks, cannot be reached at {host} "
                    f"port {port}: {error}"
                ) from error
        time.sleep(timeouts.COMMIT_PAUSE)


class _Parts(io.RawIOBase):
    """Writable stream whose bytes are sent in parts."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(memoryview(data)[:_PART_BYTES])
        _send(self._channel, {"kind": "part"}, part)
        return len(part)


class _Stream(io.RawIOBase):
    """Readable stream of a state that arrives in parts."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._part = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._part:
            message, body = _receive(self._channel)
            if message["kind"] == "end":
                return 0
            self._part = memoryview(body)
        count = min(len(buffer), len(self._part))
        buffer[:count] = self._part[:count]
        self._part = self._part[count:]
        return count


# Prefixes of the attributes with saved values in states and their handlers. TensorFlowState uses
# the second.
_SAVED = ("_saved", "_values")


def run_in_rank(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    relaunches: int,
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
