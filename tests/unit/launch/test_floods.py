"""Ranks that print faster than the output is read: bounded memory, and gaps are reported."""

from __future__ import annotations

import re
import sys
import time

import pytest

from hvd_estimators.launch import LocalBackend
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


@pytest.mark.timeout(120)
def test_every_line_arrives_or_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(relay_module, "_MOST_BATCHES", 8)
    reader = Reader(slow_lines=1000, seconds=0.002)

    LocalBackend(1, stdout=reader).run(flood, (100_000,))

    assert reader.number == 100_000
    assert reader.gaps > 0
    assert reader.left_out > 0
