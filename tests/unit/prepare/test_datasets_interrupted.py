"""An interrupt during data preparation leaves no locks and no files. No Spark."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from prepared_sets import Writer, folders, in_threads, use

from hvd_estimators import Store, clear_prepared_data, clear_training_cache
from hvd_estimators.prepare import datasets

pytestmark = pytest.mark.usefixtures("cleared_cache")


class Interrupt:
    """Trace function that raises KeyboardInterrupt before the n-th line run in some files."""

    def __init__(self, n):
        self.left = n
        self.where = None

    def __call__(self, frame, event, argument):
        if Path(frame.f_code.co_filename).name not in INTERRUPTED:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


INTERRUPTED = {"contextlib.py", "datasets.py", "leases.py", "prepared_sets.py"}


def acquired(store):
    return use(store, Writer(store))


def test_an_interrupt_at_any_point_leaves_no_locks_or_files(store):
    points = 0
    for n in itertools.count(1):
        interrupt = Interrupt(n)
        try:
            sys.settrace(interrupt)
            acquired(store)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if interrupt.where is None:
            break
        points += 1
        # Another thread does not wait, and everything can be deleted.
        (found,) = in_threads(1, lambda: acquired(store))
        assert isinstance(found, str), interrupt.where
        clear_prepared_data(store)
        assert folders(store) == [], interrupt.where
    assert points > 50


def test_kept_interrupts_do_not_block_the_next_fit(tmp_path, monkeypatch):
    """Notebooks keep the last exception, and with it all frames."""
    kept, used = [], []
    for n in itertools.count(1):
        # A dataset that a kept frame uses would add lines to each later search.
        store = Store.create(str(tmp_path / str(n)))
        monkeypatch.setattr(datasets, "_own", {})
        used.append((store, datasets._own))
        interrupt = Interrupt(n)
        try:
            sys.settrace(interrupt)
            acquired(store)
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        if interrupt.where is None:
            break
        assert acquired(store)
    kept.clear()
    for store, own in used:
        monkeypatch.setattr(datasets, "_own", own)
        clear_training_cache()
        assert folders(store) == []
