"""Destinations of ranks' output on the driver."""

from __future__ import annotations

import io
import logging
import time

import pytest

from hvd_estimators.launch.service.events import Event, RankMessage, RankOutput, RankProgress
from hvd_estimators.launch.service.output_sinks import Outlets, print_event

PROGRESS = RankProgress(0, epoch=0, epochs=1, step=1, steps=9, rows_per_second=2.5)


@pytest.mark.parametrize(
    ("given", "verbose", "streams"),
    [
        ((), 1, ()),
        ((), 2, ("",)),
        (("stdout",), 1, ("stdout",)),
        (("stderr",), 2, ("stdout", "stderr")),
        (("stdout", "stderr"), 0, ("stdout", "stderr")),
    ],
)
def test_only_requested_streams_reach_the_driver(
    given: tuple[str, ...], verbose: int, streams: tuple[str, ...]
) -> None:
    files = {name: io.StringIO() if name in given else None for name in ("stdout", "stderr")}
    outlets = Outlets(**files, prefix_output_with_timestamp=False, verbose=verbose)

    assert outlets.streams == streams
    assert outlets.are_separate == bool(given)


def test_lines_go_to_their_files_in_horovods_format_and_other_events_to_the_handler() -> None:
    out, others = io.StringIO(), list[Event]()
    handle = Outlets(out, None, False, 2).handler(others.append)

    for event in (
        RankOutput(0, "größe\n", "stdout"),
        RankOutput(1, "oops\n", "stderr"),
        PROGRESS,
        RankMessage(1, "hello"),
        RankOutput(1, "no end", "stdout"),
    ):
        handle(event)

    assert out.getvalue() == "[0]<stdout>:größe\n[1]<stdout>:no end"
    assert others == [RankOutput(1, "oops\n", "stderr"), PROGRESS, RankMessage(1, "hello")]


def test_a_line_starts_with_its_timestamp() -> None:
    out, others = io.StringIO(), list[Event]()
    handle = Outlets(out, None, True, 2).handler(others.append)
    before = time.time()

    handle(RankOutput(3, "x\n", "stdout"))
    handle(RankOutput(3, "y\n", "stderr"))

    when, rest = out.getvalue().split("[", 1)
    assert rest == "3]<stdout>:x\n"
    assert before - 1 <= time.mktime(time.strptime(when)) <= time.time()
    (other,) = others
    assert isinstance(other, RankOutput)
    assert other.text().startswith(time.asctime(time.localtime(other.time)) + "[3]<stderr>:y")


def test_messages_go_to_standard_output_and_lines_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for event in (RankOutput(2, "a\n"), RankMessage(1, "b"), PROGRESS):
        print_event(event)

    assert capsys.readouterr() == ("b\n", "[2] a\n")


def test_characters_outside_the_encoding_are_escaped() -> None:
    raw = io.BytesIO()
    handle = Outlets(io.TextIOWrapper(raw, "ascii"), None, False, 1).handler(None)

    handle(RankOutput(0, "größe\n", "stdout"))

    assert raw.getvalue() == b"[0]<stdout>:gr\\xf6\\xdfe\n"


def test_an_unwritable_file_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    handle = Outlets(out, None, False, 1).handler(None)
    out.close()

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            handle(RankOutput(0, "x\n", "stdout"))

    assert caplog.text.count("stdout: cannot be written to") == 1
