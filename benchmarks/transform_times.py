"""Interleaved timing of prediction methods, for `benchmarks.transform`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame

from benchmarks.figures import Record, compared, seconds, show_table

OF_HAND_WRITTEN = 1.1

Transform = Callable[[DataFrame], DataFrame]


def consume(frame: DataFrame) -> None:
    """Compute every row and every column, and discard them."""
    frame.write.format("noop").mode("overwrite").save()


def measure(measured: dict[str, Transform], frame: DataFrame, repeats: int) -> dict[str, Any]:
    """Return the seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(repeats):
        for name, transform in measured.items():
            times[name].append(seconds(lambda call=transform: consume(call(frame))))
    return {name: {"seconds": min(t), "all_seconds": t} for name, t in times.items()}


def show(title: str, figures: dict[str, Any], rows: int) -> float:
    """Print a table, and return this package's time as a share of a hand-written `mapInArrow`'s."""
    by_hand = figures["mapInArrow"]["seconds"]
    show_table(
        title,
        ["", "seconds", "rows/s", "of mapInArrow"],
        [
            [name, f["seconds"], int(rows / f["seconds"]), f["seconds"] / by_hand]
            for name, f in figures.items()
        ],
    )
    return float(figures["hvd_estimators"]["seconds"] / by_hand)


def records_of(table: str, figures: dict[str, Any]) -> list[Record]:
    """Return the records of the measurements of `measure`."""
    taken = {name: found["all_seconds"] for name, found in figures.items()}
    return compared(table, taken, "s", "mapInArrow")


def verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"
