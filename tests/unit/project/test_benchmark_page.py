"""Records of benchmarks, the page made from the records, and quotes in the documentation."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
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
            "figures": {},
            "records": [asdict(record) for record in RECORDS],
            "machine": MACHINE,
        }
    )


def test_the_best_or_median_value_is_compared_with_its_baseline() -> None:
    found = {(one.table, one.name): one for one in RECORDS}
    wall = found["wall", "ours"]
    assert (wall.value, wall.low, wall.high, wall.ratio) == (2.0, 2.0, 3.0, 0.25)
    assert found["speed", "ours"].value == 1234.5
    assert found["speed", "theirs"].ratio == 1.0
    assert found["middle", "ours"].value == 2.0
    assert found["middle", "ours"].baseline is None
    assert ("wall", "none") not in found


def test_results_survive_a_round_trip_through_their_file(tmp_path: Path) -> None:
    result = results.parse(document("fit"))
    file = tmp_path / "new" / "results.json"
    results.save(file, {"fit": result, "other": results.parse(document("other"))})
    assert results.load(file)["fit"] == result
    assert json.loads(file.read_text())["fit"]["date"] == "2026-01-02"
    assert results.load(tmp_path / "none.json") == {}


@pytest.mark.parametrize("line", ["", "done", "[1]", '{"benchmark": "fit"}'])
def test_a_last_line_that_is_not_a_result_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="no result"):
        results.parse(line)


def test_the_page_shows_results_with_machine_and_date(tmp_path: Path) -> None:
    results.save(tmp_path / "results.json", {"fit": results.parse(document("fit"))})
    elsewhere = {**json.loads(document("fit")), "machine": {**MACHINE, "gpu": "A device"}}
    results.save(tmp_path / "device.json", {"fit": results.parse(json.dumps(elsewhere))})
    page.write(tmp_path)
    text = (tmp_path / page.PAGE).read_text()
    for said in ("2026-01-02, commit ``abc``, A processor, 2 cores", "rows 7", "numpy 1.26"):
        assert said in text
    assert "``fit`` on A device\n" in text
    assert "image:: fit-device.svg" in text
    for row in ('ours,2,"2, 3",0.25', 'ours,"1,230","10, 1,230",2.47', '"4,096",2.5,3'):
        assert f"   {row}\n" in text


def test_each_result_has_a_reproducible_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    results.save(tmp_path / "results.json", {"fit": results.parse(document("fit"))})
    plots.draw(tmp_path)
    first = (tmp_path / "fit.svg").read_bytes()
    plots.draw(tmp_path)
    assert (tmp_path / "fit.svg").read_bytes() == first
    # Texts in the plot are stored as text, so tests can search for them.
    for said in (b"theirs", b"1,230 rows/s", b"predicted", b"bytes"):
        assert said in first


def test_failed_parts_are_named_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    scripts = {
        "prepare": "import sys; print('half a line'); sys.exit(3)",
        "fit": f"print('a table'); print(); print({document('fit')!r}); print()",
        "loader": "print('no result')",
        "launch": f"print({document('launch')!r})",
        "files": f"print({document('files')!r})",
    }
    output = tmp_path / "figures"
    results.save(output / "results.json", {"prepare": results.parse(document("prepare"))})

    def command_of(part: str, given: Sequence[str]) -> list[str]:
        assert [*given] == ["--rows", "9"]
        return [sys.executable, "-c", scripts[part]]

    monkeypatch.setattr(runner, "command_of", command_of)
    code = runner.main(["--parts", *scripts, "--rows", "9", "--output", str(output)])
    said = capsys.readouterr()
    assert code == 1
    assert said.err.strip().splitlines()[-1] == "failed: prepare, loader"
    assert "a table" in said.out
    # Failed parts keep their earlier results.
    assert [*results.load(output / "results.json")] == ["prepare", "fit", "files", "launch"]
    shown = (output / page.PAGE).read_text()
    # Quoted parts are on the page, and some of them have plots.
    assert [f"``{part}``" in shown for part in ("fit", "launch", "files")] == [True, True, False]
    assert [*output.glob("*.svg")] == [output / "fit.svg", output / "prepare.svg"]


def test_a_part_over_its_time_limit_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    script = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("{child}.new", "w").write(str(child.pid))
os.rename("{child}.new", "{child}")
time.sleep(600)
"""

    class OverOnceTheChildIsThere(threading.Thread):
        def __init__(self, limit: float, end: Callable[[], None]) -> None:
            super().__init__()
            self.end = end

        def run(self) -> None:
            while not child.exists():
                time.sleep(0.01)
            self.end()

        def cancel(self) -> None:
            self.join()

    monkeypatch.setattr(runner.threading, "Timer", OverOnceTheChildIsThere)
    with pytest.raises(subprocess.TimeoutExpired):
        runner.last_line([sys.executable, "-c", script], 9.0)
    with contextlib.suppress(psutil.NoSuchProcess):
        # A kill takes effect when the process is next scheduled; then init must reap it.
        process = psutil.Process(int(child.read_text()))
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


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
