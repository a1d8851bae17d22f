"""Feeding rows of a history to a slow consumer."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import pytest

from hvd_estimators.fitting import epoch_feed as feed_module
from hvd_estimators.fitting.epoch_feed import EpochFeed


def rows(number: int) -> list[Any]:
    return [(number, "train", "loss", 1.0)]


def test_rows_that_arrive_meanwhile_are_batched_without_blocking() -> None:
    taken: queue.Queue[Any] = queue.Queue()
    go_on = threading.Event()

    def take(found: Any) -> None:
        taken.put([row[0] for row in found])
        assert go_on.wait(10)

    feed = EpochFeed(take, "test")
    feed.put(rows(0))
    assert taken.get(timeout=10) == [0]
    for number in range(1, 5):
        feed.put(rows(number))
    assert not feed.close(0.01)
    go_on.set()
    assert feed.close(10)
    assert taken.get(timeout=10) == [1, 2, 3, 4]
    assert taken.empty()


def test_failures_are_logged_once_and_later_rows_are_delivered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed_module, "_SECONDS_BETWEEN", 0.0)
    tried: queue.Queue[Any] = queue.Queue()

    def consume(found: Any) -> None:
        tried.put([row[0] for row in found])
        if tried.qsize() < 3:
            raise ConnectionError("gone")

    feed = EpochFeed(consume, "the server")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            feed.put(rows(number))
            while tried.qsize() <= number:
                pass
        assert feed.close(10)
    assert [tried.get() for _ in range(tried.qsize())] == [[0], [1], [2]]
    assert (
        caplog.text.count("the server: metrics could not be written (ConnectionError: gone)") == 1
    )


def test_without_rows_no_thread_starts() -> None:
    before = threading.active_count()
    assert EpochFeed(lambda found: None, "test").close()
    assert threading.active_count() == before
