"""Ranks that print faster than the output is read: bounded memory, and gaps are reported."""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from hvd_estimators.launch import LocalBackend, SparkBackend
from hvd_estimators.launch.rank import output as relay_module

LINE = "x" * 91  # 100 bytes with its number and newline


class Reader:
    """A file that reads numbered lines: slowly at first, at full speed later."""

    def __init__(self, slow_lines: int, seconds: float) -> None:
        self.slow_lines = slow_lines
        self.seconds = seconds
        self.number = 0
        self.taken = 0
        self.left_out = 0
        self.gaps = 0

    def write(self, text: str) -> None:
        if self.taken < self.slow_lines:
            time.sleep(self.seconds)
        self.taken += 1
        line = text.removeprefix("[0]<stdout>:")
        gap = re.fullmatch(r"\[\.\.\. ([\d,]+) lines left out \.\.\.\]\n", line)
        if gap is None:
            assert line == f"{self.number:08}{LINE}\n"
            self.number += 1
        else:
            count = int(gap.group(1).replace(",", ""))
            self.left_out += count
            self.number += count
            self.gaps += 1


def flood(count: int) -> float:
    started = time.monotonic()
    for start in range(0, count, 1000):
        sys.stdout.write("".join(f"{i:08}{LINE}\n" for i in range(start, start + 1000)))
    return time.monotonic() - started


def long_line(length: int) -> None:
    sys.stdout.write("start" + "y" * length + "end\n")


@pytest.mark.timeout(120)
def test_every_line_arrives_or_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(relay_module, "_MOST_BYTES", 2**20)
    reader = Reader(slow_lines=1000, seconds=0.002)

    LocalBackend(1, stdout=reader).run(flood, (100_000,))

    assert reader.number == 100_000
    assert reader.gaps > 0
    assert reader.left_out > 0


@pytest.mark.timeout(60)
def test_both_ends_of_a_long_line_arrive() -> None:
    got: list[str] = []

    class Taker:
        def write(self, text: str) -> None:
            got.append(text)

    LocalBackend(1, stdout=Taker()).run(long_line, (20_000_000,))

    (line,) = got
    assert line.startswith("[0]<stdout>:startyyy")
    assert line.endswith("yyyend\n")
    assert len(line) < 10_000


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", [LocalBackend, SparkBackend])
@pytest.mark.parametrize("slow_lines", [0, 10**9])
def test_a_gigabyte_of_lines_and_a_line_of_100_megabytes(
    backend: Any, slow_lines: int, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    peak, done = [0], threading.Event()

    def watch() -> None:
        me = psutil.Process()
        while not done.wait(0.2):
            for process in [me, *me.children(recursive=True)]:
                try:
                    if process.name().startswith("python"):
                        peak[0] = max(peak[0], process.memory_info().rss)
                except psutil.Error:
                    pass

    threads = threading.active_count()
    before = psutil.Process().memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        reader = Reader(slow_lines, 0.01)
        (seconds,) = backend(1, stdout=reader).run(flood, (10_000_000,))
    finally:
        done.set()
        watcher.join()
    print(f"{backend.__name__}: {seconds:.0f} s, {reader.taken:,} taken, peak {peak[0] >> 20} MiB")
    if backend is SparkBackend and slow_lines:
        # This reader would need a quarter of an hour for the lines still buffered at the end.
        assert "it is read too slowly" in caplog.text
    else:
        assert reader.number == 10_000_000
    assert peak[0] < max(before, 300 * 2**20) + 100 * 2**20
    assert seconds < 300

    got: list[str] = []

    class Taker:
        def write(self, text: str) -> None:
            got.append(text)

    backend(1, stdout=Taker()).run(long_line, (100_000_000,))
    (line,) = got
    assert len(line) < 10_000
    assert threading.active_count() <= threads + 1
