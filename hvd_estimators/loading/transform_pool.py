"""Worker processes that run a user's transformation for a rank.

The rank sends rows to the workers in turn, and takes the results in the same order. A worker is
connected by a pipe, so no port is open. It ends with the pipe, also if the rank is killed.
Processes of ``concurrent.futures`` would survive, because each holds both ends of a queue.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import random
import signal
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from hvd_estimators._util.system import signal_of
from hvd_estimators._util.unpickle_imports import first_imports, loads
from hvd_estimators.data.arrays import Columns, num_rows, take
from hvd_estimators.exceptions import DataError, ReaderError
from hvd_estimators.loading.transform import FIRST_ROWS, Transformation, Transformed

Piece = tuple[Columns, list[int]]
"""Columns, and the seed of the random numbers that transform them."""


_PIECE_BYTES = 4 * 2**20
"""Approximate size of the results that a worker sends at a time."""


class TransformPool:
    """Processes that transform pieces of rows. Used by one thread at a time.

    Parameters
    ----------
    transformation : Transformation
        Applied to every piece.
    workers : int
        Number of processes. Each transforms one piece at a time.

    Attributes
    ----------
    is_closed : bool
        Whether the processes have ended.
    """

    def __init__(self, transformation: Transformation, workers: int) -> None:
        # Not forked: this process has threads, which may hold locks.
        context: Any = multiprocessing.get_context("forkserver")
        # The server imports what all workers need, once.
        context.set_forkserver_preload([__name__])
        sent = cloudpickle.dumps((*first_imports(), transformation))
        self.is_closed = False
        self._workers: list[tuple[Any, Connection]] = []
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, sent), name="hvd_estimators transformation", daemon=True
            )
            process.start()
            there.close()
            self._workers.append((process, here))

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
        (measured,) = self._map(iter([(few, [*seed, first_row])]))
        size = sum(array.nbytes for array in measured.values()) / max(num_rows(measured), 1)
        step = max(int(_PIECE_BYTES / max(size, 1)), 1)
        sent: deque[Columns] = deque()

        def pieces() -> Iterator[Piece]:
            position = first_row
            for part in itertools.chain([first], parts):
                for start in range(0, num_rows(part), step):
                    sent.append(take(part, slice(start, start + step)))
                    yield sent[-1], [*seed, position]
                    position += num_rows(sent[-1])

        for result in self._map(pieces()):
            transformed.check(result, sent.popleft())
            yield result

    def _map(self, pieces: Iterator[Piece]) -> Generator[Columns, None, None]:
        """Yield the transformed pieces, in order."""
        busy: deque[tuple[Any, Connection]] = deque()

        def has_sent(worker: tuple[Any, Connection]) -> bool:
            piece = next(pieces, None)
            if piece is not None:
                _send(worker, piece)
                busy.append(worker)
            return piece is not None

        try:
            all(map(has_sent, self._workers))
            while busy:
                worker = busy.popleft()
                result = _receive(worker)
                if isinstance(result, BaseException):
                    raise result
                # The worker gets the next piece before the consumer uses this result.
                has_sent(worker)
                yield result
        finally:
            with contextlib.suppress(ReaderError):
                for worker in busy:  # Results that nothing takes.
                    _receive(worker)

    def close(self) -> None:
        """End the processes."""
        self.is_closed = True
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.terminate()
            process.join()


def _send(worker: tuple[Any, Connection], value: Any) -> None:
    try:
        _write(worker[1], value)
    except OSError:
        raise _ended(worker[0]) from None


def _receive(worker: tuple[Any, Connection]) -> Any:
    try:
        return _read(worker[1])
    except (EOFError, OSError):
        raise _ended(worker[0]) from None


def _ended(process: Any) -> ReaderError:
    process.join()
    how = signal_of(process.exitcode) or f"exit code {process.exitcode}"
    return ReaderError(
        f"A worker process of the transformation ended ({how}). If it was killed, memory may be "
        "short: set a smaller train_reader_num_workers or val_reader_num_workers. With "
        "reader_pool_type='thread', the rank's own process transforms the rows."
    )


def _write(connection: Connection, value: Any) -> None:
    """Send an object; the memory of its arrays is not copied into a pickle first."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    connection.send_bytes(pickle.dumps((head, len(buffers))))
    for buffer in buffers:
        connection.send_bytes(buffer.raw())


def _read(connection: Connection) -> Any:
    head, count = pickle.loads(connection.recv_bytes())
    return pickle.loads(head, buffers=[connection.recv_bytes() for _ in range(count)])


def _work(connection: Connection, sent: bytes) -> None:
    """Transform pieces until the rank closes the connection. Runs in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformation: Any = None
    while True:
        try:
            columns, seed = _read(connection)
        except (EOFError, OSError):
            return
        try:
            # Not before the first piece, so that the rank gets the error of loading.
            transformation = transformation or loads(sent)[-1]
            _seed(seed)
            result: Any = transformation(columns)
        except Exception as error:
            result = _portable(error)
        try:
            _write(connection, result)
        except (BrokenPipeError, ConnectionError):
            return


def _seed(seed: list[int]) -> None:
    """Set the state of random generators, which then depends on the rows and not on the worker."""
    numbers = np.random.SeedSequence(seed).generate_state(4)
    random.seed(numbers.tobytes())
    np.random.seed(numbers)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(numbers[0]))


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
