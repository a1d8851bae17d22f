"""Calls that a thread makes one after another."""

from __future__ import annotations

import threading

import pytest

from hvd_estimators.fitting.run_loggers import CallQueue


def test_calls_are_made_in_order_without_blocking() -> None:
    go_on, made = threading.Event(), []
    calls = CallQueue("test")
    first = calls.put(lambda: made.append(go_on.wait(10)))
    others = [calls.put(lambda number=number: made.append(number)) for number in range(4)]
    calls.close()
    assert not calls.join(0.01)
    assert not first.done()
    go_on.set()
    assert calls.join(10)
    assert all(each.done() for each in others)
    assert made == [True, 0, 1, 2, 3]


def test_a_failed_call_ends_no_other() -> None:
    made = []
    calls = CallQueue("test")
    failed = calls.put(lambda: 1 / 0)
    calls.put(lambda: made.append(1)).result(10)
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert made == [1]
    calls.close()
    assert calls.join(10)


def test_without_calls_no_thread_starts() -> None:
    before = threading.active_count()
    calls = CallQueue("test")
    calls.close()
    assert calls.join(10)
    assert threading.active_count() == before
