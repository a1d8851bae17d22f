"""Lines on their way to somebody who may be slow: all of them, or a number of those left out."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence

import pytest

from hvd_estimators.launch.rank import output as relay_module
from hvd_estimators.launch.rank.output import RateLimiter, Relay

pytestmark = pytest.mark.timeout(60)

Lines = Sequence[tuple[str, str]]


def test_what_is_taken_in_time_arrives_whole_and_in_order() -> None:
    taken: list[tuple[str, str]] = []
    sent = [("ab"[i % 3 == 0], f"line {i} größe\n") for i in range(20_000)]

    with Relay(taken.extend) as relay:
        for stream, line in sent:
            relay.put(stream, [line])

    assert taken == sent
    assert not [t for t in threading.enumerate() if t is relay._thread]


def test_lines_that_nobody_takes_are_counted_and_wait_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(relay_module, "_PATIENCE_SHARE", 0.0)
    go_on, taken = threading.Event(), []

    def take(lines: Lines) -> None:
        go_on.wait()
        taken.extend(lines)

    with Relay(take) as relay:
        started = time.monotonic()
        for number in range(200_000):
            relay.put("x", [f"{number:05} {'.' * 90}\n"])
        held_up = time.monotonic() - started
        assert relay._bytes <= 2**23
        go_on.set()

    notes = [line for _, line in taken if "left out" in line]
    numbers = [int(line[:5]) for _, line in taken if "left out" not in line]
    (note,) = notes
    assert taken[-1] == ("x", note)
    left_out = int(re.sub(r"\D", "", note))
    assert numbers == list(range(200_000 - left_out))
    assert 0 < len(numbers) * (97 + 128) <= 2**23 + 2 * 2**16
    assert held_up < 20  # far from what the lines that nobody took would have cost


def test_after_a_pause_lines_arrive_again_behind_the_number_of_those_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(relay_module, "_MOST_BYTES", 10 * 130)
    go_on, entered, taken = threading.Event(), threading.Event(), []

    def take(lines: Lines) -> None:
        entered.set()
        go_on.wait()
        taken.extend(line for _, line in lines)

    with Relay(take) as relay:
        relay.put("", ["a\n"])
        entered.wait()
        for _ in range(15):
            relay.put("", ["b\n"])
        go_on.set()
        while relay._bytes:
            time.sleep(0.001)
        relay.put("", ["c\n"])

    assert taken == ["a\n", *["b\n"] * 10, "[... 5 lines left out ...]\n", "c\n"]


def test_who_never_takes_anything_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "_NOTE_SECONDS", 0.1)
    go_on = threading.Event()
    relay = Relay(lambda lines: go_on.wait() and None)
    relay.put("", ["a\n"])

    started = time.monotonic()
    relay.close(0.2)
    relay.put("", ["b\n"])

    assert time.monotonic() - started < 10
    go_on.set()
    relay._thread.join()


def test_who_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuse(lines: Lines) -> None:
        asked.append(lines)
        raise BrokenPipeError("nobody listens")

    with caplog.at_level(logging.WARNING), Relay(refuse) as relay:
        for _ in range(100_000):
            relay.put("", ["x" * 1000])

    assert len(asked) == 1
    assert caplog.text.count("cannot be delivered") == 1


def test_an_allowance_comes_back_with_time_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    allowance = RateLimiter(5, 0.5)

    allowance.use(7)
    assert allowance.left() == 0
    now[0] += 6
    assert allowance.left() == 1  # 2 were overdrawn
    now[0] += 100
    assert allowance.left() == 5
