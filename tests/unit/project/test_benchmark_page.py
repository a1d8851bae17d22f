"""Records of benchmarks, the page made from the records, and quotes in the documentation."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

import benchmarks.__main__ as runner
from benchmarks import page, quotes, results
from benchmarks.figures import compared

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "docs" / "figures"
RECORDS = [
    *compared("wall", {"ours": [2.5, 2.0, 3.0], "theirs": [8.0, 9.0], "none": []}, "s", "theirs"),
    *compared("speed", {"ours": [10.0, 1234.5], "theirs": [500.0]}, "rows/s", "theirs"),
    *compared("middle", {"ours": [1.0, 2.0, 9.0]}, "ms", middle=True),
    *compared("time by bytes", {"measured": [1.5], "predicted": [1.0]}, "ms", at=4),
    *compared("time by bytes", {"measured": [2.5], "predicted": [3.0]}, "ms", at=4096),
]
MACHINE = {"cpu": "A processor", "cores": 2, "memory_gib": 4.0, "load_before": 0.5, "numpy": "1.26"}


def document(part: str) -> str:
    """Return the last line of a benchmark's output."""
    return json.dumps(
        {
            "benchmark": part,
            "date": "2026-01-02",
            "commit": "abc",
            "settings": {"rows": 7},
            "records": [asdict(record) for record in RECORDS],
            "machine": MACHINE,
        }
    )


def test_quoted_figures_are_divided_and_rounded_and_others_kept(tmp_path: Path) -> None:
    result = results.parse(document("fit"))
    assert quotes.Quote("fit", "wall", "theirs", "ours", 1).text({"fit": result}) == "4.0"
    assert quotes.Quote("fit", "wall", "ours").text({"fit": result}) == "2.00"
    document_file = tmp_path / "README.rst"
    document_file.write_text("|a| and |b|\n\n.. |a| replace:: 1\n.. |b| replace:: 2\n")
    quotes.rewrite(document_file, {"a": "7", "c": "8"})
    assert quotes.written(document_file.read_text()) == {"a": "7", "b": "2"}
    quotes.write(tmp_path / "quoted.txt", {"a": "7"})
    quotes.write(tmp_path / "quoted.txt", {"c": "8"})
    assert quotes.written((tmp_path / "quoted.txt").read_text()) == {"a": "7", "c": "8"}


def names_of(module: str) -> set[str]:
    """Return the names in a module of this repository, without importing it."""
    path = ROOT / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {each.stem for each in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # Names that are imported lazily.
    return found


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda f: f.stem)
def test_names_that_benchmarks_import_exist(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] in ("benchmarks", "hvd_estimators"):
                there = names_of(node.module)
                assert {alias.name for alias in node.names} <= there, node.module
            if node.module == "benchmarks":
                modules |= {
                    alias.name: names_of(f"benchmarks.{alias.name}") for alias in node.names
                }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.attr in modules.get(node.value.id, {node.attr}), node.value.id


def test_the_documentation_quotes_the_results() -> None:
    measured = quotes.texts(results.load(FIGURES / "results.json"))
    quoted = quotes.written((FIGURES / quotes.QUOTED).read_text(encoding="utf-8"))
    # Quotes of parts that were not measured again stay the same.
    assert quoted == {**quoted, **measured}
    assert set(quoted) <= set(quotes.QUOTES)
    for document_file in runner.QUOTING:
        text = document_file.read_text(encoding="utf-8")
        found = quotes.written(text)
        assert found == {name: quoted[name] for name in found}
        assert set(re.findall(r"\|(\w+)\|", text)) == set(found)


def test_the_documentations_page_matches_its_results() -> None:
    assert (FIGURES / page.PAGE).read_text(encoding="utf-8") == page.text(FIGURES)
    assert {file.stem for file in FIGURES.glob("*.svg")} == {*page.CHARTS}


def test_the_page_marks_figures_of_older_commits(tmp_path: Path) -> None:
    older = json.dumps({**json.loads(document("fit")), "commit": "older", "date": "2026-01-01"})
    found = {"fit": results.parse(older), "prepare": results.parse(document("prepare"))}
    results.save(tmp_path / "results.json", found)
    text = page.text(tmp_path)
    assert text.count("Older than the newest figures") == 1
    (line,) = (line for line in text.splitlines() if "Older than the newest" in line)
    assert "commit ``older``" in line


def test_a_busy_machine_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "last_line", lambda *of: document("fit"))
    arguments = ["--parts", "fit", "--output", str(tmp_path)]
    for load, files in ((1.2, []), (0.9, ["results.json"])):
        monkeypatch.setattr(runner.figures, "load", lambda load=load: load)
        monkeypatch.setattr(runner, "publish", lambda *of: None)
        assert runner.main(arguments) == (not files)
        assert [file.name for file in tmp_path.iterdir()] == files
    assert "fit: other programs use 1.2 processors. End them." in capsys.readouterr().err
