"""Whoever is interrupted while data are prepared leaves nothing locked or behind. No Spark."""

from __future__ import annotations

import itertools
import linecache
import sys
from pathlib import Path

import pytest
from prepared_sets import Writer, folders, in_threads, use

from hvd_estimators import clear_prepared_data

pytestmark = pytest.mark.usefixtures("cleared_cache")


class Interrupt:
    """Raises KeyboardInterrupt before the n-th line that is run in some files."""

    def __init__(self, n):
        self.left = n
        self.where = None

    def __call__(self, frame, event, argument):
        if Path(frame.f_code.co_filename).name not in INTERRUPTED:
            return None
        # Between a block's end and the release of its lock, which is C code, Python looks for
        # no signals; a tracer is called there all the same.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.strip().startswith("with self._lock"):
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


INTERRUPTED = {
    "reuse.py",
    "registry.py",
    "claims.py",
    "owners.py",
    "contextlib.py",
    "prepared_sets.py",
}


@pytest.mark.parametrize("name", ["rows", None])
def test_an_interrupt_at_any_point_leaves_nothing_locked_or_behind(store, name):
    points = 0
    for n in itertools.count(1):
        interrupt = Interrupt(n)
        try:
            sys.settrace(interrupt)
            use(store, Writer(store), name)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if interrupt.where is None:
            break
        points += 1
        # Another thread needs not wait, and all can be deleted.
        (found,) = in_threads(1, lambda: use(store, Writer(store), name))
        assert isinstance(found, str), interrupt.where
        clear_prepared_data(store)
        assert folders(store) == [], interrupt.where
    assert points > 50


def test_an_interrupt_that_is_looked_at_later_does_not_stop_the_next_fit(store):
    """Notebooks keep the last exception, and with it all that was going on."""
    kept = []
    for n in itertools.count(1):
        interrupt = Interrupt(n)
        try:
            sys.settrace(interrupt)
            use(store, Writer(store))
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        if interrupt.where is None:
            break
        assert use(store, Writer(store))
        clear_prepared_data(store)
    kept.clear()
    use(store, Writer(store))
    clear_prepared_data(store)
    assert folders(store) == []
