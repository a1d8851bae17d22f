"""Measuring and showing of figures; needs neither Spark nor a framework."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One figure of a contender.

    Attributes
    ----------
    table : str
        The comparison. All records of a table have one unit, and form one table of the page.
    name : str
        The contender.
    value : float
        The best measurement, or the median.
    unit : str
        ``"s"``, ``"rows/s"``, ``"MiB"``; empty for a ratio.
    low, high : float
        The smallest and the largest measurement.
    baseline : str or None
        The contender of the same table for comparison.
    ratio : float or None
        This value divided by the baseline's.
    at : float or None
        Position on the axis of a line plot: bytes, or ranks.
    """

    table: str
    name: str
    value: float
    unit: str
    low: float
    high: float
    baseline: str | None = None
    ratio: float | None = None
    at: float | None = None


def compared(
    table: str,
    measured: Mapping[str, Sequence[float]],
    unit: str,
    baseline: str | None = None,
    *,
    at: float | None = None,
    middle: bool = False,
) -> list[Record]:
    """Return the records of a table: the best measurement of each contender.

    Parameters
    ----------
    table : str
        The table.
    measured : dict
        All measurements of each contender; contenders without any are left out.
    unit : str
        For rates (``"…/s"``) and ratios (``""``), larger is better; for others, smaller is.
    baseline : str, optional
        The contender with which all are compared.
    at : float, optional
        Position on the axis of a line plot.
    middle : bool
        Whether to use the median instead of the best.
    """
    best: Callable[[Sequence[float]], float] = max if unit.endswith("/s") or not unit else min
    value = {
        name: float(statistics.median(all_of_it) if middle else best(all_of_it))
        for name, all_of_it in measured.items()
        if all_of_it
    }
    base = value.get(baseline) if baseline is not None else None
    return [
        Record(
            table,
            name,
            one,
            unit,
            float(min(measured[name])),
            float(max(measured[name])),
            baseline if base else None,
            one / base if base else None,
            at,
        )
        for name, one in value.items()
    ]


LOAD_BEFORE = os.getloadavg()[0]
"""Load of the machine in the minute before, without the benchmark's own load."""


def seconds(action: Callable[[], Any]) -> float:
    """Return the wall time of a call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def parser(description: str | None, rows: int, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    result.add_argument("--rows", type=int, default=rows, help="rows of the DataFrame")
    result.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        help="times each is measured, in turn; the best counts",
    )
    return result


def machine() -> dict[str, Any]:
    """Describe the machine and the relevant versions; None for packages that are not installed."""
    packages = (
        *("torch", "tensorflow", "keras", "lightning", "pytorch-lightning", "horovod"),
        *("pyspark", "petastorm", "pyarrow", "numpy"),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpu": _gpu(),
        "load_before": round(LOAD_BEFORE, 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return found.replace("\n", ", ") if found else None


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; floats get three significant digits."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *cells]:
        first, *rest = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def show_result(
    name: str,
    settings: dict[str, Any],
    figures: dict[str, Any],
    records: Sequence[Record] = (),
) -> None:
    """Print all measurements as JSON, as the last line.

    Parameters
    ----------
    name : str
        The benchmark.
    settings : dict
        Sizes and similar settings.
    figures : dict
        All measurements, in the benchmark's own form.
    records : sequence of Record
        The records that the page shows.
    """
    document = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "settings": settings,
        "figures": figures,
        "records": [asdict(record) for record in records],
        "machine": machine(),
    }
    print(f"\n{json.dumps(_rounded(document))}", flush=True)


def _commit() -> str | None:
    """Return the commit of these sources, with a plus if there are changes since."""
    here = Path(__file__).parent
    head = _output("git", "-C", str(here), "rev-parse", "--short=10", "HEAD")
    if head is None:  # The sources are not in a repository.
        return None
    sources = ("../hvd_estimators", "*.py")
    changed = _output("git", "-C", str(here), "status", "--porcelain", "--", *sources)
    return head + ("+" if changed else "")


def _output(*command: str) -> str | None:
    """Return a command's output, or None if it fails or does not exist."""
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip()


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
