"""Each fault in the documentation has tests, which ``tests/FAULTS.rst`` names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEST = re.compile(r"``(test_\w+\.py)::(test_\w+)``")


def rows(file: Path) -> list[list[str]]:
    """Return the cells of the rows of a file's table, without the header."""
    text = file.read_text(encoding="utf-8")
    table = text[text.index(".. list-table:: Faults") :]
    # The table ends at the first line that is not indented.
    body = re.split(r"\n(?=\S)", table, maxsplit=1)[0]
    found = re.split(r"\n\s+\* - ", body)[1:]
    return [[" ".join(cell.split()) for cell in re.split(r"\n\s+- ", row)] for row in found[1:]]


DOCUMENTED = rows(ROOT / "docs" / "fault_tolerance.rst")
TESTED = rows(ROOT / "tests" / "FAULTS.rst")


def test_every_fault_has_an_outcome_and_a_loss() -> None:
    assert len(DOCUMENTED) > 10
    for row in DOCUMENTED:
        assert len(row) == 3, row
        assert all(row), row


def test_every_documented_fault_has_tests() -> None:
    assert [row[0] for row in TESTED] == [row[0] for row in DOCUMENTED]
    for row in TESTED:
        assert TEST.search(row[1]), row[0]


def test_the_named_tests_exist() -> None:
    paths = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for row in TESTED:
        for file, name in TEST.findall(row[1]):
            assert file in paths, f"{row[0]}: there is no {file}"
            tree = ast.parse(paths[file].read_text())
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert name in defined, f"{row[0]}: {file} has no {name}"


def test_pages_for_users_name_no_tests() -> None:
    named = {
        (page.name, name)
        for page in (ROOT / "docs").rglob("*.rst")
        if page.parent.name != "decisions" and page.name != "architecture.rst"
        for name in re.findall(r"\btest_\w+\.py", page.read_text(encoding="utf-8"))
    }
    assert named == set()
