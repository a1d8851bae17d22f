"""Figures that the documentation quotes, as substitutions generated from the results."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Result

QUOTED = "quoted.txt"
"""File of substitutions, beside the results, that documentation pages include."""


@dataclass(frozen=True)
class Quote:
    """A figure, optionally divided by another of the same table.

    Attributes
    ----------
    part, table, name : str
        Part, table and contender of the figure.
    over : str or None
        The contender by which it is divided.
    digits : int
        Digits after the decimal point.
    """

    part: str
    table: str
    name: str
    over: str | None = None
    digits: int = 2

    def text(self, results: Mapping[str, Result]) -> str:
        """Return the figure as it is quoted."""
        result = results[self.part]
        value = result.value(self.table, self.name)
        if self.over is not None:
            value /= result.value(self.table, self.over)
        return f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Measured:
    """The day and the machine of a part's measurements."""

    part: str

    def text(self, results: Mapping[str, Result]) -> str:
        """Return the day, the processor, its cores and the memory."""
        result = results[self.part]
        return f"{result.date}, {result.machine_text}"


OURS, BASELINE = "hvd_estimators", "horovod.spark"
_WITHOUT = "without validation"
_ALLREDUCE = "torch, to the first allreduce"
_NARROW = "narrow, batch 1000"

QUOTES: Mapping[str, Quote | Measured] = {
    "fit_measured": Measured("fit"),
    "transform_measured": Measured("transform"),
    "fit_speedup": Quote("fit", "fit", BASELINE, OURS, 1),
    "fit_over_by_hand": Quote("fit", "fit", OURS, "by hand", 1),
    "fit_of_distributor": Quote("fit", "fit", OURS, "TorchDistributor"),
    "fit_fixed": Quote("fit", "fixed cost", OURS, None, 1),
    "fit_fixed_by_hand": Quote("fit", "fixed cost", "by hand", None, 1),
    "fit_fixed_of_horovod_spark": Quote("fit", "fixed cost", BASELINE, None, 1),
    "transform_speedup": Quote("transform", "8-64-1", BASELINE, OURS, 1),
    "transform_of_own_workers": Quote("transform", "8-64-1", OURS, "mapInArrow, its own workers"),
    "transform_of_map_in_arrow": Quote("transform", "8-64-1", OURS, "mapInArrow"),
    "loader_times_petastorm": Quote("loader", _NARROW, "ours, arrow", "BatchedDataLoader", 1),
    "loader_of_decoding": Quote("loader", _NARROW, "ours, arrow", "PyArrow decoding"),
    "prepare_over_write": Quote("prepare", _WITHOUT, "prepare_data", "plain write"),
    "prepare_over_write_unshuffled": Quote(
        "prepare", _WITHOUT, "prepare_data, not shuffled", "plain write"
    ),
    "launch_next": Quote("launch", _ALLREDUCE, "next launches"),
    "launch_first": Quote("launch", _ALLREDUCE, "first launch", None, 1),
    "launch_horovod_spark": Quote("launch", _ALLREDUCE, "horovod.spark.run", None, 1),
    "launch_distributor": Quote("launch", _ALLREDUCE, "TorchDistributor", None, 1),
    "memory_petastorm": Quote("memory", "peak of a rank, petastorm", "8 GiB", "1 GiB"),
    "memory_arrow": Quote("memory", "peak of a rank, arrow", "8 GiB", "1 GiB"),
    "shuffle_random": Quote("shuffle", "accuracy", "random order", None, 3),
    "shuffle_16": Quote("shuffle", "accuracy", "16 MiB groups, arrow", None, 3),
    "shuffle_128": Quote("shuffle", "accuracy", "128 MiB groups, arrow", None, 3),
    "shuffle_one": Quote("shuffle", "accuracy", "one group, arrow", None, 3),
    "stores_s3": Quote("stores", "arrow", "S3", "local"),
    "stores_hdfs": Quote("stores", "arrow", "HDFS", "local"),
}

_DEFINITION = re.compile(r"^\.\. \|(\w+)\| replace:: (.*)$", re.MULTILINE)


def texts(results: Mapping[str, Result]) -> dict[str, str]:
    """Return the quoted figures for which there are results."""
    found = {}
    for name, quote in QUOTES.items():
        with contextlib.suppress(KeyError):  # not run, or with other sizes
            found[name] = quote.text(results)
    return found


def written(text: str) -> dict[str, str]:
    """Return the substitutions that a document defines."""
    return dict(_DEFINITION.findall(text))


def rewrite(file: Path, found: Mapping[str, str]) -> None:
    """Update the figures in the substitutions that a document defines."""
    text = file.read_text(encoding="utf-8")
    new = _DEFINITION.sub(
        lambda match: f".. |{match[1]}| replace:: {found.get(match[1], match[2])}", text
    )
    if new != text:
        file.write_text(new, encoding="utf-8")


def write(file: Path, found: Mapping[str, str]) -> None:
    """Write all substitutions to a file; those without a new figure stay unchanged."""
    before = written(file.read_text(encoding="utf-8")) if file.is_file() else {}
    lines = [f".. |{name}| replace:: {text}" for name, text in {**before, **found}.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
