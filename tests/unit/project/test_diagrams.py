"""The diagrams of README and deployment pages are those that their script draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).parents[3] / "docs"


def test_the_files_are_those_that_the_script_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))["diagrams"]()
    files = {name: (DOCS / "_static" / name).read_text(encoding="utf-8") for name in drawn}
    assert files == drawn
    for text in drawn.values():
        ElementTree.fromstring(text)


def test_sequences_name_modules_that_exist() -> None:
    sequences = runpy.run_path(str(DOCS / "diagrams.py"))["SEQUENCES"]
    launch = DOCS.parent / "hvd_estimators" / "launch"
    steps = [step for sequence in sequences.values() for step in sequence.steps]
    assert len(steps) > 20
    assert [module for *_, module in steps if not (launch / module).is_file()] == []
    page = (DOCS / "architecture.rst").read_text(encoding="utf-8")
    assert all(f".. image:: _static/sequence_{name}.svg" in page for name in sequences)


def test_every_deployment_page_shows_its_diagram() -> None:
    for page in (DOCS / "deploy").glob("*.rst"):
        if page.stem != "index":
            text = page.read_text(encoding="utf-8")
            assert (
                f".. container:: diagram\n\n   .. image:: ../_static/topology_{page.stem}.svg"
                in text
            ), page.stem
