"""Output of ranks: forwarded to the driver, and kept for errors."""

import os
import pickle
import sys
import threading
import time

import cloudpickle
import pytest

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.rank import output
from hvd_estimators.launch.rank.outcome import results_in_order
from hvd_estimators.launch.rank.output import Relay
from hvd_estimators.launch.rank.process import RankProcess, pickle_call

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(60)

MEGABYTES_20 = 20 * 10**6


def run(fn, on_lines=lambda lines: None):
    def handle(stream, lines):
        assert stream == ""
        on_lines(lines)

    with RankProcess(3, "here", pickle_call(fn, (), {}), os.environ, handle) as process:
        return process.outcome()


def test_every_line_is_forwarded_and_the_end_of_the_output_is_kept():
    lines = []

    def chatter():
        for number in range(5000):
            print("line", number)
        sys.stderr.write("last words, without a newline")
        raise ValueError

    outcome = run(chatter, on_lines=lines.extend)

    assert lines[:5000] == [f"line {number}\n" for number in range(5000)]
    assert "line 4999\nlast words, without a newline" in outcome.output_tail
    assert "line 4000\n" not in outcome.output_tail
    assert f"[... {len(lines) - 60:,} lines left out ...]\n" in outcome.output_tail


def test_binary_output_is_decoded_with_replacement_characters():
    lines = []

    outcome = run(lambda: sys.stdout.buffer.write(b"\xff\xc3\xb6\r\n1\r2"), lines.extend)

    assert pickle.loads(outcome.result) == 8
    assert lines == ["\ufffdö\n", "1\n", "2"]


def test_a_long_line_is_divided_and_its_end_is_kept():
    lines = []

    def print_batch():
        sys.stdout.write("the start" + "x" * MEGABYTES_20 + "the end")
        sys.stdout.flush()
        os._exit(1)

    outcome = run(print_batch, lines.extend)

    assert max(map(len, lines)) < 40_000
    # The last part has no line break.
    assert "".join(line.rstrip("\n") for line in lines) == (
        "the start" + "x" * MEGABYTES_20 + "the end"
    )
    assert outcome.output_tail.rstrip("\n").endswith("xxxthe end")
    assert len(outcome.output_tail) < 70_000


def test_a_long_exception_message_is_shortened():
    def fail():
        print("y" * 5000 + "\n" * 10, end="")
        raise ValueError("the start" + "x" * MEGABYTES_20 + "the end")

    with pytest.raises(WorkerFailedError) as raised:
        results_in_order([run(fail)])

    message = str(raised.value)
    assert len(message) < 200_000
    assert "ValueError: the startxxx" in message
    assert "xxxthe end\n" in message


def test_many_lines_are_kept_up_to_a_size_limit():
    outcome = run(lambda: [print("x" * 5000) for _ in range(1000)] and os._exit(1))

    assert len(outcome.output_tail) < 70_000
    assert outcome.output_tail.count("x" * 5000 + "\n") == 13  # of 65,536 characters


def test_a_rank_continues_if_its_output_cannot_be_forwarded(caplog):
    def refuse(lines):
        raise BrokenPipeError("nobody listens")

    outcome = run(lambda: print("x\n" * 10**6) or "done", refuse)

    assert pickle.loads(outcome.result) == "done"
    assert len(caplog.records) == 1


def test_a_reader_that_blocks_does_not_delay_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_NOTE_SECONDS", 0.1)
    go_on = threading.Event()
    relay = Relay(lambda stream, lines: go_on.wait() and None)
    relay.put("", ["a\n"])

    started = time.monotonic()
    relay.close(0.2)
    relay.put("", ["b\n"])

    assert time.monotonic() - started < 10
    go_on.set()
    relay._thread.join()
