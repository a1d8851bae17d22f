"""Python blocks of README and documentation, run unchanged, each page from top to bottom.

A literal block after a Python block must match the output of that block.

A page may use the names of `PROGRAM` without defining them. Paths below ``/shared`` and ``/tmp``
are moved to a folder of the test.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documented
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.once, pytest.mark.integration]

PAGES = documented.pages()

FIRST = ("README", "quickstart")
"""Pages that run in each test run: those of newcomers.

Others run in soak runs, and are type-checked in each run.
"""


PROGRAM = documented.blocks_of(documented.ROOT / "docs" / "programs.rst")
"""The program that other pages continue."""


ASSUMED = {"assembler", "indexer", "loader", "loss", "optimizer"}
"""Names that blocks which are not run may take for given, too."""


def _run(block: documented.Block, namespace: dict[str, Any], folder: Path) -> str:
    """Run a block with its shared and temporary files in a folder, and return what it prints."""
    tree = ast.parse(re.sub("/(?:shared|tmp)/", f"{folder}/", ast.unparse(block.tree)))
    for old, new in zip(ast.walk(tree), ast.walk(block.tree), strict=True):
        ast.copy_location(old, new)
    # One stream for both, which keeps the lines in order.
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        exec(compile(ast.fix_missing_locations(tree), str(block.page), "exec"), namespace)
    return stream.getvalue()


@pytest.fixture
def in_temp_folder(tmp_path: Path) -> Iterator[Path]:
    """Change to a temporary working folder."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("begins\nEpoch 2/2: 39 rows/s, loss=0.08\n   a  0.0181\n1", True),
        ("Epoch 1/2: 39 rows/s, loss=0.08\n   a  0.0181\n1", False),
        ("Epoch 2/2: 39 rows/s, loss=0.18\n   a  0.0181\n1", False),
        ("Epoch 2/2: 39 rows/s, loss=0.08\n   a  0.0281\n1", False),
        ("Epoch 2/2: 39 rows/s, val_loss=0.08\n   a  0.0181\n1", False),
        ("", False),
    ],
)
def test_output_that_differs_from_the_page_is_found(printed: str, expected: bool) -> None:
    shown = "Epoch 2/2: 2,109 rows/s, loss=0.0726\na 0.01...\n..."
    assert documented.prints(shown, printed) is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=() if p.stem in FIRST else pytest.mark.soak) for p in PAGES],
)
def test_blocks_of_a_page_run(page: Path, spark: Any, in_temp_folder: Path) -> None:
    pytest.importorskip("petastorm", reason="they run in the default environment alone")
    blocks = documented.blocks_of(page)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    wanted = documented.names_wanted(blocks)
    given = documented.names_made(PROGRAM)
    unknown = wanted - given - ASSUMED
    assert not unknown, f"{page.name}: what are {sorted(unknown)}?"
    if wanted & given & documented.names_wanted([block for block in blocks if block.runs]):
        for block in PROGRAM:
            _run(block, namespace, in_temp_folder)
    for block in blocks:
        documented.check_imports(block, namespace)
        documented.check_keywords(block, namespace)
        if block.runs:
            printed = _run(block, namespace, in_temp_folder)
            assert documented.prints(block.shown, printed), f"{block.shown}\n\nis not\n\n{printed}"
