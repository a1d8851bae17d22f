"""How figures are taken and shown; needs neither Spark nor a framework."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any


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
    """Describe the machine and the versions that matter; None for what is not installed."""
    packages = ("torch", "pyspark", "horovod", "petastorm", "pyarrow", "numpy")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; floats get three digits that count."""
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


def show_result(name: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Print, as the last line, everything that was measured as JSON."""
    document = {"benchmark": name, "settings": settings, **figures, "machine": machine()}
    print(f"\n{json.dumps(_rounded(document))}", flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
