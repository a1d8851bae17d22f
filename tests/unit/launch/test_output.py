"""What ranks print: passed on, and kept for errors."""

import os
import pickle
import sys
import time

import cloudpickle
import pytest

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.rank.outcome import results_in_order
from hvd_estimators.launch.rank.output import shortened
from hvd_estimators.launch.rank.process import RankProcess, pickle_call

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(60)

MEGABYTES_20 = 20 * 10**6


def run(fn, on_lines=None):
    with RankProcess(3, "here", pickle_call(fn, (), {}), os.environ, on_lines) as process:
        return process.outcome()


def test_the_end_of_a_long_output_is_kept_and_every_line_is_passed_on():
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


def test_an_outcome_waits_for_lines_that_are_still_on_their_way():
    def chatter():
        print(*range(50), sep="\n")
        os._exit(1)

    outcome = run(chatter, on_lines=lambda lines: time.sleep(0.5))

    assert outcome.output_tail.endswith("\n48\n49\n")


def test_output_that_is_no_text_does_not_disturb():
    lines = []

    outcome = run(lambda: sys.stdout.buffer.write(b"\xff\xc3\xb6\r\n1\r2"), lines.extend)

    assert pickle.loads(outcome.result) == 8
    assert lines == ["\ufffdö\n", "1\n", "2"]


def test_a_long_line_is_passed_on_and_kept_in_part():
    lines = []

    def print_batch():
        sys.stdout.write("the start" + "x" * MEGABYTES_20 + "the end")
        sys.stdout.flush()
        os._exit(1)

    outcome = run(print_batch, lines.extend)

    (line,) = lines
    assert line == outcome.output_tail
    assert len(line) < 10_000
    assert line.startswith("the startxxx")
    assert line.endswith("xxxthe end")
    ends = line.split(f"[... {MEGABYTES_20 + 16 - 8192:,} characters left out ...]")
    assert [len(end) for end in ends] == [4096, 4096]


def test_an_exception_with_a_long_message_is_raised_in_part():
    def fail():
        print("y" * 5000 + "\n" * 10, end="")
        raise ValueError("the start" + "x" * MEGABYTES_20 + "the end")

    with pytest.raises(WorkerFailedError) as raised:
        results_in_order([run(fail)])

    message = str(raised.value)
    assert len(message) < 200_000
    assert "ValueError: the startxxx" in message
    assert "xxxthe end\n" in message


def test_many_lines_are_kept_up_to_a_size():
    outcome = run(lambda: [print("x" * 5000) for _ in range(1000)] and os._exit(1))

    assert len(outcome.output_tail) < 70_000
    assert outcome.output_tail.count("x" * 5000 + "\n") == 13  # of 65,536 characters


def test_a_rank_whose_output_cannot_be_passed_on_goes_on(caplog):
    def refuse(lines):
        raise BrokenPipeError("nobody listens")

    outcome = run(lambda: print("x\n" * 10**6) or "done", refuse)

    assert pickle.loads(outcome.result) == "done"
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("length", "left_out"), [(10, 0), (11, 1), (1000, 990)])
def test_a_text_is_shortened_to_its_ends(length, left_out):
    text = "".join(chr(ord("0") + i % 10) for i in range(length))

    gap = f"[... {left_out} characters left out ...]" if left_out else ""
    assert shortened(text, 10) == text[:5] + gap + text[-5:]
