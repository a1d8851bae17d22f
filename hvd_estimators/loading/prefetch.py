"""An iterator that a thread reads ahead of its consumer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from typing_extensions import Self

__all__ = ["Prefetch"]

T = TypeVar("T")

_END = object()


class Prefetch(Generic[T]):
    """Reads an iterator in a thread, a bounded number of items ahead.

    What the iterator raises is raised by `__next__`. `close` ends the thread and closes the
    iterator, in that thread, if it is a generator.

    Parameters
    ----------
    source : iterator
        Drawn from by the thread alone.
    ahead : int
        Items that wait for the consumer, at most.
    name : str
        Name of the thread.
    """

    def __init__(self, source: Iterator[T], ahead: int, name: str) -> None:
        self._source = source
        self._items: queue.Queue[object] = queue.Queue(ahead)
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        item = _END if self._closing.is_set() else self._items.get()
        if item is _END:
            self.close()
            if self._error is not None:
                raise self._error
            raise StopIteration
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """End the thread; waits for it."""
        self._closing.set()
        while self._thread.is_alive():
            # The thread may be waiting for room.
            while not self._items.empty():
                self._items.get_nowait()
            self._thread.join(0.01)

    def _run(self) -> None:
        try:
            for item in self._source:
                self._items.put(item)
                if self._closing.is_set():
                    break
        except BaseException as error:
            self._error = error
        try:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            self._error = self._error or error
        finally:
            # The consumer waits for this, whatever happened before.
            self._items.put(_END)
