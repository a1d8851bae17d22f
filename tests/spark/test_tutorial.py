"""The tutorial notebook runs from top to bottom, with its plots and its progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


def test_the_tutorial_runs_with_plots_and_complete_progress_bars(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, 4)
    stored = [pictures(cell) for cell in notebook.cells]

    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
        store_widget_state=True,
    )
    client.execute()

    # The outputs stored in the repository match the cells.
    assert [pictures(cell) for cell in notebook.cells] == stored
    assert sum(stored) == 3
    states = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    bars = [
        widget["state"] for widget in states.values() if "FloatProgress" in widget["model_name"]
    ]
    assert [(bar["value"], bar["bar_style"]) for bar in bars] == [
        (bar["max"], "success") for bar in bars
    ]
    assert sorted(bar["max"] for bar in bars) == [930, 930, 1240]

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
