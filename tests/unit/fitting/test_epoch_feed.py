"""Rows of a history, on their way to somebody slow."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import pytest

from hvd_estimators.fitting import progress as feed_module
from hvd_estimators.fitting.progress import EpochFeed


def rows(number: int) -> list[Any]:
    return [(number, "train", "loss", 1.0)]


def test_what_comes_while_it_is_taken_is_taken_together_and_nobody_waits() -> None:
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


def test_what_fails_is_tried_again_with_what_comes_next_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed_module, "_SECONDS_AFTER_FAILURE", 0.0)
    tried: queue.Queue[Any] = queue.Queue()

    def take(found: Any) -> None:
        tried.put([row[0] for row in found])
        if tried.qsize() < 3 and failing:
            raise ConnectionError("gone")

    failing = True
    feed = EpochFeed(take, "the server")
    with caplog.at_level(logging.WARNING):
        feed.start()
        feed.put(rows(0))
        while tried.qsize() < 3:
            pass
        assert feed.close(10)
    seen = [tried.get() for _ in range(tried.qsize())]
    assert seen[-1] == [0] or seen[-2:] == [[0], []]
    assert caplog.text.count("the server: could not be told") == 1

    failing = False
    feed = EpochFeed(lambda found: 1 / 0, "the server")
    feed.put(rows(0))
    assert not feed.close(10)


def test_without_anything_to_take_there_is_no_thread() -> None:
    before = threading.active_count()
    assert EpochFeed(lambda found: None, "test").close()
    assert threading.active_count() == before
