"""Each row of the documentation's table of faults names an existing test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEST = re.compile(r"``(test_\w+\.py)::(test_\w+)``")


def rows() -> list[list[str]]:
    """Return the cells of the table's rows, without the header."""
    text = (ROOT / "docs" / "fault_tolerance.rst").read_text()
    table = text[text.index(".. list-table:: Faults") :]
    # The table ends at the first line that is not indented.
    body = re.split(r"\n(?=\S)", table, maxsplit=1)[0]
    found = re.split(r"\n\s+\* - ", body)[1:]
    return [re.split(r"\n\s+- ", row) for row in found[1:]]


def test_every_row_has_an_outcome_a_loss_and_a_test() -> None:
    found = rows()
    assert len(found) > 10
    for row in found:
        assert len(row) == 4, row
        assert all(cell.strip() for cell in row), row
        assert TEST.search(row[3]), row[0]


def test_the_named_tests_exist() -> None:
    paths = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows():
        for file, name in TEST.findall(row[3]):
            assert file in paths, f"{row[0]}: there is no {file}"
            tree = ast.parse(paths[file].read_text())
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert name in defined, f"{row[0]}: {file} has no {name}"
