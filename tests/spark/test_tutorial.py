"""The tutorial notebook runs from top to bottom, with its plots and the progress of its fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


def test_the_tutorial_runs_with_plots_and_complete_progress(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, 4)
    stored = [pictures(cell) for cell in notebook.cells]

    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()

    # The outputs stored in the repository match the cells.
    assert [pictures(cell) for cell in notebook.cells] == stored
    assert sum(stored) == 3
    texts = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "display_data"
    ]
    bars = [text for text in texts if "100%|" in text]
    assert [int(re.findall(r" (\d+)/\1 ", bar)[0]) for bar in bars] == [930, 1240, 930]
    assert sum(text.startswith("Wrote training data in ") for text in texts) == 3

    (table,) = (
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "RMSE (minutes)" in output.get("data", {}).get("text/plain", "")
    )
    rmse = dict(line.rsplit(maxsplit=1) for line in table.splitlines()[:2])
    assert float(rmse["network"]) < 0.9 * float(rmse["as it departed"])


def pictures(cell: Any) -> int:
    outputs = cell.get("outputs", [])
    return sum("image/png" in output.get("data", {}) for output in outputs)
