"""Page of all figures in reStructuredText: tables, days and machines."""

from __future__ import annotations

import ast
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Record
from benchmarks.quotes import QUOTES
from benchmarks.results import Result, load

PAGE = "index.rst"
CHARTS = ("prepare", "transform", "loader", "fit", "scaling")
"""Parts with a plot on the page. Other parts that the documentation quotes have tables only."""

_SHOWN = {*CHARTS, *(quote.part for quote in QUOTES.values())}
_HEAD = """\
.. Written by ``python -m benchmarks`` from the files of results beside it. Do not edit.

Measured figures
================

Results of ``make bench`` that the documentation quotes; ``results.json`` beside this page has all.
The column *from, to* has the lowest and the highest value. Launches show the median, and all other
measurements the best. The last column is the ratio to the named baseline. For seconds and MiB, less
is better. :doc:`../benchmarks` describes each measurement.

"""
_NAMED = {"cpu", "cores", "memory_gib", "gpu", "load_before"}


def write(folder: Path) -> None:
    """Write the page for all result files of a folder into the folder."""
    (folder / PAGE).write_text(text(folder), encoding="utf-8")


def text(folder: Path) -> str:
    """Return the page for all result files of a folder."""
    found = everything(folder)
    newest = max(((of.date, of.commit or "") for _, of in found), default=None)
    sections = (_section(name, result, newest) for name, result in found)
    blocks = [_HEAD, *sections, _versions(found)]
    return "\n".join(blocks).rstrip() + "\n"


def everything(folder: Path) -> list[tuple[str, Result]]:
    """Return a folder's results for the page and their names; the default file comes first."""
    files = sorted(folder.glob("*.json"), key=lambda file: (file.stem != "results", file.stem))
    return [
        (part if file.stem == "results" else f"{part}-{file.stem}", result)
        for file in files
        for part, result in load(file).items()
        if part in _SHOWN
    ]


def _section(name: str, result: Result, newest: Any) -> str:
    title = f"``{result.part}``"
    if name != result.part:
        title += f" on {result.machine.get('gpu') or result.machine['cpu']}"
    is_newest = newest is None or (result.date, result.commit or "") == newest
    told = _circumstances(result) + ("" if is_newest else " **Older than the newest figures.**")
    lines = [title, "-" * len(title), "", _purpose(result.part), "", told, ""]
    if result.part in CHARTS:
        lines += [
            f".. image:: {name}.svg",
            f"   :alt: The figures of {result.part}, as in the tables.",
            "",
        ]
    for table, records in result.tables.items():
        lines += (
            _lines_table(table, records) if records[0].at is not None else _table(table, records)
        )
    return "\n".join(lines)


def _purpose(part: str) -> str:
    """Return the first paragraph of a benchmark's docstring."""
    source = Path(__file__).with_name(f"{part}.py")
    if not source.is_file():
        return ""
    doc = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n\n")[0].replace("`", "``").replace("````", "``")


def _circumstances(result: Result) -> str:
    load = result.machine.get("load_before")
    settings = ", ".join(f"{name} {_setting(value)}" for name, value in result.settings.items())
    return (
        f"{result.date}"
        + (f", commit ``{result.commit}``" if result.commit else "")
        + f", {result.machine_text}"
        + ("" if load is None else f", load before {load:g}")
        + (f"; {settings}." if settings else ".")
    )


def _versions(found: Sequence[tuple[str, Result]]) -> str:
    """Return the installed versions, for each set of parts that share them."""
    parts: dict[str, list[str]] = {}
    for name, result in found:
        packages = {name: of for name, of in result.machine.items() if of and name not in _NAMED}
        text = ", ".join(f"{package} {version}" for package, version in packages.items())
        parts.setdefault(f"{result.machine_text}: {text}", []).append(f"``{name}``")
    if not found:
        return ""
    lines = ["Versions", "--------", ""]
    for text, names in parts.items():
        lines += [f"{', '.join(names)}", f"    {text}", ""]
    return "\n".join(lines)


def _setting(value: Any) -> str:
    return json.dumps(value).replace('"', "").replace("_", " ")


def _table(table: str, records: Sequence[Record]) -> list[str]:
    unit = records[0].unit or "value"
    spread = any(record.low != record.high for record in records)
    baseline = next((record.baseline for record in records if record.baseline), None)
    header = ["\\", unit]
    header += ["from, to"] if spread else []
    header += [f"of {baseline}"] if baseline else []
    rows = []
    for one in records:
        row = [one.name, shown(one.value)]
        row += [f"{shown(one.low)}, {shown(one.high)}"] if spread else []
        row += ["" if one.ratio is None else shown(one.ratio)] if baseline else []
        rows.append(row)
    return _csv_table(table, header, rows)


def _lines_table(table: str, records: Sequence[Record]) -> list[str]:
    """Return a table of records on an axis: a row for each position, a column for each name."""
    names = list(dict.fromkeys(record.name for record in records))
    axis, _, title = table.rpartition(" by ")
    value = {(one.at, one.name): shown(one.value) for one in records}
    places = sorted({one.at for one in records if one.at is not None})
    rows = [
        [f"{at:,g}" if at < 1e6 else f"{at:,.0f}", *(value.get((at, n), "") for n in names)]
        for at in places
    ]
    header = [title if axis else "\\", *(f"{name}, {records[0].unit}" for name in names)]
    return _csv_table(table, header, rows)


def _csv_table(table: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    lines = [f"   {line}" for line in text.getvalue().splitlines()]
    return [f".. csv-table:: {table}", "   :header-rows: 1", "   :align: left", "", *lines, ""]


def shown(value: float) -> str:
    """Format a number with three significant digits."""
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or not value else f"{value:.2g}"
