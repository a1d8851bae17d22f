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

import psutil


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


_LOAD_SECONDS = 3.0


def load() -> float:
    """Return the number of processors that are in use, measured for some seconds.

    The system's load average would count the benchmark before.
    """
    return float(psutil.cpu_percent(_LOAD_SECONDS)) / 100 * (os.cpu_count() or 1)


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the options of a benchmark, each with the type of its default.

    A default of False is a switch; a tuple takes several values.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in defaults.items():
        kind: dict[str, Any] = {"type": type(default), "help": " "}
        if default is False:
            kind = {"action": "store_true", "help": " "}
        elif isinstance(default, tuple):
            kind = {"type": type(default[0]), "nargs": "+", "help": " "}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    return parser.parse_args()


def in_turns(
    contenders: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 0
) -> dict[str, list[float]]:
    """Call each contender in turn; return the numbers that it returned, or else its seconds."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_up + repeats):
        for name, contender in contenders.items():
            started = time.perf_counter()
            value = contender()
            taken = time.perf_counter() - started
            if turn >= warm_up:
                found[name].append(value if isinstance(value, float) else taken)
                print(f"{name}: {found[name][-1]:.4g}", flush=True)
    return found


def rows_per_second(rows: int, read: Callable[[], int]) -> Callable[[], float]:
    """Return a contender that reads all rows; its number is the rate."""

    def run() -> float:
        found = 0
        # Petastorm's pool occasionally ends without a row; such a time does not count.
        while not found:
            started = time.perf_counter()
            found = read()
        assert found % rows == 0, (found, rows)
        return found / (time.perf_counter() - started)

    return run


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


def show_result(name: str, settings: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Print the tables of the records and, as the last line, all of it as JSON.

    Parameters
    ----------
    name : str
        The benchmark.
    settings : dict
        Sizes and similar settings.
    records : sequence of Record
        The figures.
    """
    for record, before in zip(records, [None, *records], strict=False):
        if before is None or before.table != record.table:
            of = f"of {record.baseline}" if record.baseline else ""
            print(f"\n{record.table}: {record.unit}, least, most, {of}")
        place = "" if record.at is None else f", {record.at:g}"
        ratio = "" if record.ratio is None else f"{record.ratio:10.2f}"
        numbers = f"{record.value:12.4g}{record.low:12.4g}{record.high:12.4g}{ratio}"
        print(f"{record.name + place:42}{numbers}")
    document = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "settings": settings,
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
