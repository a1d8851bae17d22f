"""Worker processes that run a user's transformation for a rank.

The rank sends rows to the workers in turn, and takes the results in the same order. A worker is
connected by a pipe, so no port is open. It ends with the pipe, also if the rank is killed.
Processes of ``concurrent.futures`` would survive, because each holds both ends of a queue.
Results come through shared memory, so the rank does not copy them.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from hvd_estimators._util.system import memory_file, signal_of
from hvd_estimators._util.unpickle_imports import first_imports, loads
from hvd_estimators.data.arrays import Array, Columns, num_rows, take
from hvd_estimators.exceptions import DataError, ReaderError
from hvd_estimators.loading.transform import FIRST_ROWS, Transformed

Piece = tuple[Any, list[int]]
"""Columns or a `RowTable`, and the seed of the random numbers that transform them."""

_PIECE_BYTES = 2 * 2**20
"""Approximate size of the results that a worker sends at a time."""

_IN_FLIGHT = 2
"""Number of pieces that a worker has; it transforms one while the next one waits."""

_SLOTS = _IN_FLIGHT + 2
"""Results of a worker in shared memory: in flight, in use, and used until the next one comes."""

_SLOT_BYTES = 4 * _PIECE_BYTES
"""Maximum size of a result in shared memory; only memory that was written to exists."""

_ALIGNMENT = 64


class TransformPool:
    """Processes that transform pieces of rows, or collate them. Used by one thread at a time.

    Parameters
    ----------
    transformation : Transformation or Collate
        Applied to every piece.
    workers : int
        Number of processes. Each transforms one piece at a time.

    Attributes
    ----------
    is_closed : bool
        Whether the processes have ended.
    """

    def __init__(self, transformation: Callable[[Any], Any], workers: int) -> None:
        # Not forked: this process has threads, which may hold locks.
        context: Any = multiprocessing.get_context("forkserver")
        # The server imports what all workers need, once.
        context.set_forkserver_preload([__name__])
        sent = cloudpickle.dumps((*first_imports(), transformation))
        self.is_closed = False
        self._workers = [_Worker(context, sent) for _ in range(workers)]

    def transform(
        self, parts: Iterator[Columns], transformed: Transformed, seed: list[int], first_row: int
    ) -> Generator[Columns, None, None]:
        """Yield the transformed rows of parts, in order, in pieces of a fixed number of rows.

        Parameters
        ----------
        parts : iterator of Columns
            The rows.
        transformed : Transformed
            Checks the results.
        seed : list of int
            Seed of the random numbers. The position of a piece is added to it.
        first_row : int
            Position of the first row.

        Raises
        ------
        ReaderError
            If a worker has ended.
        DataError
            See `Transformed`.
        Exception
            The error of the user's function, with a note of where it was raised.
        """
        first = next(parts, None)
        if first is None:
            return
        # The size of the results is measured with a few rows.
        few = take(first, slice(0, FIRST_ROWS))
        (measured,) = self.map(iter([(few, [*seed, first_row])]))
        size = sum(array.nbytes for array in measured.values()) / max(num_rows(measured), 1)
        step = max(int(_PIECE_BYTES / max(size, 1)), 1)
        del measured  # It takes a slot.
        given: deque[Columns] = deque()

        def pieces() -> Iterator[Piece]:
            position = first_row
            for part in itertools.chain([first], parts):
                for start in range(0, num_rows(part), step):
                    given.append(take(part, slice(start, start + step)))
                    yield given[-1], [*seed, position]
                    position += num_rows(given[-1])

        for result in self.map(pieces()):
            transformed.check(result, given.popleft())
            yield result

    def map(self, pieces: Iterator[Piece]) -> Generator[Any, None, None]:
        """Yield the results for some pieces, in order; see `transform` for errors."""
        busy: deque[_Worker] = deque()

        def has_sent(worker: _Worker) -> bool:
            piece = next(pieces, None)
            if piece is not None:
                worker.send(piece)
                busy.append(worker)
            return piece is not None

        try:
            all(map(has_sent, self._workers * _IN_FLIGHT))
            while busy:
                worker = busy.popleft()
                result = worker.receive()
                if isinstance(result, BaseException):
                    raise result
                # The worker gets the next piece before the consumer uses this result.
                has_sent(worker)
                yield result
        finally:
            with contextlib.suppress(ReaderError):
                for worker in busy:  # Results that nothing takes.
                    worker.receive()

    def close(self) -> None:
        """End the processes."""
        self.is_closed = True
        for worker in self._workers:
            worker.close()


class _Worker:
    """A process, and the rank's side of its pipe and memory."""

    def __init__(self, context: Any, sent: bytes) -> None:
        self._connection, there = context.Pipe()
        self.process = context.Process(
            target=_work, args=(there, sent), name="hvd_estimators transformation", daemon=True
        )
        self.process.start()
        there.close()
        with memory_file() as file:
            file.truncate(_SLOTS * _SLOT_BYTES)
            self._memory = mmap.mmap(file.fileno(), 0)
            reduction.send_handle(self._connection, file.fileno(), self.process.pid)
        # Each function returns what uses a slot, or None.
        self._users: list[Callable[[], Any]] = [lambda: None] * _SLOTS
        self._slots: deque[int | None] = deque()

    def send(self, piece: Piece) -> None:
        """Send a piece, with a free slot for its result."""
        free = (slot for slot, user in enumerate(self._users) if user() is None)
        slot = next(free, None)
        if slot is not None:
            self._users[slot] = lambda: self
        self._slots.append(slot)
        try:
            _write(self._connection, (piece, slot))
        except OSError:
            raise self._ended() from None

    def receive(self) -> Any:
        """Return the next result; its arrays may be in a slot, which is free again without them."""
        slot = self._slots.popleft()
        memory = None
        if slot is not None:
            # The arrays of the result are views of this one and keep it alive.
            memory = np.frombuffer(self._memory, np.uint8, _SLOT_BYTES, slot * _SLOT_BYTES)
            self._users[slot] = weakref.ref(memory)
        try:
            return _read(self._connection, memory)
        except (EOFError, OSError):
            raise self._ended() from None

    def close(self) -> None:
        """End the process; results in its memory can still be used."""
        self._connection.close()
        self.process.terminate()
        self.process.join()

    def _ended(self) -> ReaderError:
        self.process.join()
        how = signal_of(self.process.exitcode) or f"exit code {self.process.exitcode}"
        return ReaderError(
            f"A worker process of the transformation ended ({how}). If it was killed, memory may "
            "be short: set a smaller train_reader_num_workers or val_reader_num_workers. With "
            "reader_pool_type='thread', the rank's own process transforms the rows."
        )


def _write(connection: Connection, value: Any, memory: Array | None = None) -> None:
    """Send an object; its arrays are copied to the memory if they fit, and sent otherwise."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    ends = itertools.accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    starts = [0, *ends]
    shared = memory is not None and starts[-1] <= len(memory)
    places = [slice(start, start + a.nbytes) for start, a in zip(starts, arrays, strict=False)]
    if memory is not None and shared:
        for array, place in zip(arrays, places, strict=True):
            memory[place] = np.frombuffer(array, np.uint8)
    connection.send_bytes(pickle.dumps((head, places, shared)))
    for array in () if shared else arrays:
        connection.send_bytes(array)


def _read(connection: Connection, memory: Array | None = None) -> Any:
    """Return an object; its arrays may be views of the memory."""
    head, places, shared = pickle.loads(connection.recv_bytes())
    if memory is not None and shared:
        return pickle.loads(head, buffers=[memory[place] for place in places])
    return pickle.loads(head, buffers=[connection.recv_bytes() for _ in places])


def _work(connection: Connection, sent: bytes) -> None:
    """Transform pieces until the rank closes the connection. Runs in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        memory = mmap.mmap(reduction.recv_handle(connection), 0)
    except (OSError, RuntimeError):  # The rank has ended.
        return
    slots = np.frombuffer(memory, np.uint8).reshape(_SLOTS, _SLOT_BYTES)
    pieces: queue.SimpleQueue[tuple[Piece, int | None] | None] = queue.SimpleQueue()
    # Pieces are received while a large result is sent. Otherwise, both sides might wait to send.
    threading.Thread(target=_receive_pieces, args=(connection, pieces), daemon=True).start()
    transformation: Any = None
    while (received := pieces.get()) is not None:
        (columns, seed), slot = received
        try:
            # Not before the first piece, so that the rank gets the error of loading.
            transformation = transformation or _loaded(sent)
            _seed(seed)
            result: Any = transformation(columns)
        except Exception as error:
            result = _portable(error)
        try:
            _write(connection, result, None if slot is None else slots[slot])
        except (BrokenPipeError, ConnectionError):
            return
        except Exception as error:  # Pickle's, before anything was sent.
            unsent = DataError(
                "The result of the function cannot be sent from a worker process to the rank "
                f"({type(error).__name__}: {error}). Return what can be pickled, or set "
                "reader_pool_type='thread'."
            )
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                _write(connection, unsent)


def _loaded(sent: bytes) -> Any:
    """Return the function; torch gets one thread in it, because other processes compute as well."""
    function = loads(sent)[-1]
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    return function


def _receive_pieces(connection: Connection, pieces: queue.SimpleQueue[Any]) -> None:
    """Receive pieces until the rank closes the connection, which a None tells."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            pieces.put(_read(connection))
    pieces.put(None)


def _seed(seed: list[int]) -> None:
    """Set the state of random generators, which then depends on the rows and not on the worker."""
    numbers = np.random.SeedSequence(seed).generate_state(4)
    random.seed(numbers.tobytes())
    np.random.seed(numbers)
    torch = sys.modules.get("torch")
    if torch is not None:
        # Unlike torch.manual_seed(), this does not note the stack for a GPU, which takes longer.
        torch.default_generator.manual_seed(int(numbers[0]))


def _portable(error: Exception) -> Exception:
    """Return an error that another process can load, with a note of where it was raised."""
    where = "".join(traceback.format_exception(error))
    error = error.with_traceback(None)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = DataError(f"The transformation raised {type(error).__name__}: {error}")
    error.add_note(f"In a worker process of the transformation:\n{where}")
    return error
