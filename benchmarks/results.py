"""Files of results: the measurements of each part, with day and machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Record


@dataclass(frozen=True)
class Result:
    """Measurements of one part.

    Attributes
    ----------
    part : str
        The benchmark's name.
    date : str
        The day, as ``2026-11-23``, in UTC.
    commit : str or None
        Commit of the sources; a plus means that they had been changed since.
    settings : dict
        Sizes and similar settings.
    machine : dict
        Processor, cores, memory, versions, processors that were in use before.
    records : tuple of Record
        The figures.
    """

    part: str
    date: str
    commit: str | None
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    records: tuple[Record, ...]

    @property
    def tables(self) -> dict[str, list[Record]]:
        """The records of each table, in the order of the tables' first records."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.table, []).append(record)
        return found

    @property
    def machine_text(self) -> str:
        """The GPU if there is one, the processor, its cores and the memory."""
        machine = self.machine
        named = [machine["gpu"]] if machine.get("gpu") else []
        named += [machine["cpu"], f"{machine['cores']} cores", f"{machine['memory_gib']:g} GiB"]
        return ", ".join(named)

    def value(self, table: str, name: str) -> float:
        """Return a figure; the KeyError for a missing one names it."""
        for record in self.records:
            if (record.table, record.name) == (table, name):
                return record.value
        raise KeyError(f"{self.part}: {table}: {name}")


def parse(line: str) -> Result:
    """Return the result that a benchmark prints as its last line; ValueError if it is not one."""
    try:
        return _result(json.loads(line))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"The last line is no result: {line[:200]!r}") from error


def load(file: Path) -> dict[str, Result]:
    """Return the results in a file by their parts; empty if the file does not exist."""
    if not file.is_file():
        return {}
    documents = json.loads(file.read_text(encoding="utf-8"))
    return {part: _result({"benchmark": part, **of}) for part, of in documents.items()}


def save(file: Path, results: Mapping[str, Result]) -> None:
    """Write results to a file, one record per line, so that diffs are readable."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for part, result in results.items():
        head = {name: getattr(result, name) for name in ("date", "commit", "settings", "machine")}
        lines = [f'    "{name}": {json.dumps(value)}' for name, value in head.items()]
        records = ",\n".join(f"      {json.dumps(vars(record))}" for record in result.records)
        lines.append(f'    "records": [\n{records}\n    ]')
        parts.append(f'  "{part}": {{\n' + ",\n".join(lines) + "\n  }")
    whole = "{\n" + ",\n".join(parts) + "\n}\n"
    aside = file.with_suffix(".new")
    aside.write_text(whole, encoding="utf-8")
    aside.replace(file)


def _result(document: Mapping[str, Any]) -> Result:
    return Result(
        document["benchmark"],
        document["date"],
        document["commit"],
        document["settings"],
        document["machine"],
        tuple(Record(**record) for record in document["records"]),
    )
