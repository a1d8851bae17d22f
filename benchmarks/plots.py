"""Plots of the figures: bars for contenders, lines for values on an axis."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Record
from benchmarks.page import CHARTS, everything, shown
from benchmarks.results import Result

OURS = re.compile(
    r"hvd_estimators|\bours\b|Estimator|^estimator|trainer|launches|first launch|prepare_data"
    r"|every \d+ steps|^(arrow|petastorm), (small|large)|^measured"
)
"""Names of this package's contenders, which have their own colour."""

BLUE, GREY = "#2a6fbb", "#b4b9c0"
LINES = ("#2a6fbb", "#d1622b", "#3b8f5a", "#8a5fb0", "#6b7280", "#c2a11c")
WIDE_RANGE = 100
"""Ratio of the largest value to the smallest from which the axis is logarithmic."""

FEW = 8
"""Number of ranks up to which their axis is linear."""

COLUMNS, TITLE_WIDTH = 2, 42


def draw(folder: Path) -> None:
    """Plot the results of a folder that have a chart into the folder."""
    import matplotlib

    matplotlib.use("svg")
    # Save text as text, and the same figures as the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "figures", "font.size": 9})
    for name, result in everything(folder):
        if result.part in CHARTS:
            picture(result).savefig(
                folder / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white"
            )


def picture(result: Result) -> Any:
    """Return the plot of a result: a panel for each table."""
    from matplotlib.figure import Figure

    tables = list(result.tables.items())
    rows = math.ceil(len(tables) / COLUMNS)
    columns = min(len(tables), COLUMNS)
    bars = [
        max((_height(of) for _, of in tables[i : i + COLUMNS]))
        for i in range(0, len(tables), COLUMNS)
    ]
    figure = Figure(figsize=(4.1 * columns, sum(bars)), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, height_ratios=bars)
    for index, panel in enumerate(panels.flat):
        if index >= len(tables):
            panel.axis("off")
            continue
        table, records = tables[index]
        title = textwrap.fill(table, _title_width(records))
        panel.set_title(title, fontsize=9, fontweight="bold", loc="left")
        (_lines if records[0].at is not None else _bars)(panel, table, records)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _title_width(records: Sequence[Record]) -> int:
    """Return the number of letters that fit in a title, which begins after the names of bars."""
    names = 0 if records[0].at is not None else max(len(record.name) for record in records)
    return max(TITLE_WIDTH - names * 2 // 3, TITLE_WIDTH // 2)


def _height(records: Sequence[Record]) -> float:
    return 3.0 if records[0].at is not None else 0.75 + 0.26 * len(records)


def _bars(panel: Any, table: str, records: Sequence[Record]) -> None:
    values = [record.value for record in records]
    names = [record.name for record in records]
    colours = [BLUE if OURS.search(name) else GREY for name in names]
    is_wide = min(values) > 0 and max(values) / min(values) > WIDE_RANGE
    panel.barh(names, values, color=colours, height=0.7)
    if is_wide:
        panel.set_xscale("log")
    if "of measured" in table:
        panel.axvline(1, color="#6b7280", linestyle=":", linewidth=1)
    panel.invert_yaxis()
    panel.margins(x=0.25)
    panel.set_xticks([])
    panel.set_xticks([], minor=True)
    panel.spines["bottom"].set_visible(False)
    unit = records[0].unit
    panel.bar_label(
        panel.containers[0], [f" {shown(v)} {unit}".rstrip() for v in values], fontsize=8, padding=1
    )
    panel.tick_params(axis="y", length=0)
    if is_wide:
        panel.set_xlabel("logarithmic", fontsize=7, loc="right", color="#6b7280")


def _lines(panel: Any, table: str, records: Sequence[Record]) -> None:
    names = list(dict.fromkeys(record.name for record in records))
    for name, colour in zip(names, LINES * len(names), strict=False):
        points = [(one.at, one.value) for one in records if one.name == name]
        is_predicted = "predicted" in name
        panel.plot(
            *zip(*points, strict=True),
            label=name,
            color=LINES[_pair(names, name)] if is_predicted else colour,
            marker="" if is_predicted else "o",
            linestyle="--" if is_predicted else "-",
            markersize=4,
        )
    places = {record.at for record in records if record.at is not None}
    is_wide = max(places) / max(min(places), 1e-9) > WIDE_RANGE
    if is_wide or max(places) > FEW:
        panel.set_xscale("log", base=2)
    if not is_wide:
        panel.set_xticks(sorted(places), [f"{place:g}" for place in sorted(places)])
    values = [record.value for record in records if record.value > 0]
    if values and max(values) / min(values) > WIDE_RANGE:
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)
    panel.minorticks_off()
    panel.set_xlabel(table.rpartition(" by ")[2])
    panel.set_ylabel(records[0].unit)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7, frameon=False)


def _pair(names: Sequence[str], name: str) -> int:
    """Return the index of the measured line of a predicted one; both have the same colour."""
    partner = name.replace("predicted", "measured")
    return names.index(partner if partner in names else name) % len(LINES)
