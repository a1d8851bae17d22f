"""Pages of ``docs/deploy``: their commands are those of files in ``deploy``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
PAGES = sorted((ROOT / "docs" / "deploy").glob("*.rst"))
FILES = sorted(
    file
    for file in DEPLOY.rglob("*")
    if file.is_file() and file.name != "README.rst" and "__pycache__" not in file.parts
)

PROGRAMS = ("kubectl", "databricks", "pip", "cd")
"""Programs that pages may run without a script."""


def test_pages_include_every_file() -> None:
    included = {
        (page.parent / name).resolve()
        for page in PAGES
        for name in re.findall(r"\.\. literalinclude:: (\S+)", page.read_text(encoding="utf-8"))
    }
    # Tables on the install page show the files of pins.
    files = [file for file in FILES if file.suffix != ".txt"]
    assert [file for file in files if file not in included] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_on_pages_run_scripts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"\.\. code-block:: sh\n\n((?:    .*\n|\n)+)", text)
    assert len(blocks) == text.count(".. code-block:: sh\n")
    for command in "".join(blocks).replace("\\\n", " ").split("\n"):
        if command.strip():
            program = re.match(r"\s*(?:[A-Z_]+=\S+\s+)*(sh deploy/|(\w+) )", command)
            assert program, command
            assert program[2] in (None, *PROGRAMS), command
            for file in re.findall(r"deploy/[\w./-]+", command):
                assert (ROOT / file).exists(), command


@pytest.mark.parametrize(
    "script", [file for file in FILES if file.suffix == ".sh"], ids=lambda file: file.name
)
def test_scripts_are_valid_and_stop_at_the_first_error(script: Path) -> None:
    # Spark reads its spark-env.sh into another shell.
    is_sourced = script.name == "spark-env.sh"
    shell = "sh" if is_sourced else script.read_text().splitlines()[0].removeprefix("#!/bin/")
    subprocess.run([shell, "-n", str(script)], check=True)
    assert is_sourced or re.search(r"^set -eu", script.read_text(), re.MULTILINE)


def test_the_index_of_recipes_names_every_folder() -> None:
    text = (DEPLOY / "README.rst").read_text(encoding="utf-8")
    folders = {file.relative_to(DEPLOY).parts[0] for file in FILES if file.parent != DEPLOY}
    assert folders == set(re.findall(r"^``(\w+)/``", text, re.MULTILINE))
