"""The display of a fit in a saved notebook, executed by a real kernel."""

from __future__ import annotations

from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytestmark = pytest.mark.timeout(180)

START = """
import contextlib, threading, types
from hvd_estimators.fitting.progress import StageRow, show_progress
from hvd_estimators.launch.service.events import RankMessage, RankProgress

data = types.SimpleNamespace(num_ranks=2, train_steps_per_epoch=4)
run = types.SimpleNamespace(run_id="mine")
spec = types.SimpleNamespace(verbose=1, epochs=2, run=run, data=data)

def in_thread(call, *args):
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()

def progress(epoch, step):
    return RankProgress(0, epoch, 2, step, 4, 1234.5, {"loss": 0.5 / (epoch + 1)}, step == 4)
"""

FIT = """
with StageRow("Writing training data") as stage:
    stage.finish("Wrote 3 rows.")
with show_progress(spec) as handle:
    for epoch in range(2):
        for step in (2, 4):
            in_thread(handle, progress(epoch, step))
        in_thread(handle, RankMessage(0, f"message {epoch}"))
"""

OPEN = """
stack = contextlib.ExitStack()
handle = stack.enter_context(show_progress(spec))
"""

ELSEWHERE = """
in_thread(handle, progress(0, 4))
stack.close()
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the outputs of the cells as a saved notebook has them."""
    folder = tmp_path_factory.mktemp("notebook")
    sources = {"start": START, "fit": FIT, "open": OPEN, "elsewhere": ELSEWHERE}
    notebook = nbformat.v4.new_notebook(
        cells=list(map(nbformat.v4.new_code_cell, sources.values()))
    )
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    nbformat.write(notebook, folder / "saved.ipynb")
    saved = nbformat.read(folder / "saved.ipynb", 4)
    return {name: cell.outputs for name, cell in zip(sources, saved.cells, strict=True)}


def test_a_saved_notebook_has_stages_and_epochs_in_their_cell(cells: dict[str, list[Any]]) -> None:
    outputs = cells["fit"]
    streams = "".join(output.text for output in outputs if output.output_type == "stream")
    assert streams.splitlines() == [
        "Epoch 1/2: 1,234 rows/s, loss=0.5",
        "message 0",
        "Epoch 2/2: 1,234 rows/s, loss=0.25",
        "message 1",
    ]
    written, launched, bar = (
        output.data["text/plain"] for output in outputs if output.output_type == "display_data"
    )
    assert written == "Wrote 3 rows."
    assert launched.startswith("Started 2 processes in ")
    assert bar.startswith("Epoch 2/2: 100%")
    assert " 8/8 " in bar


def test_epochs_do_not_appear_in_the_cell_that_runs_later(cells: dict[str, list[Any]]) -> None:
    assert cells["elsewhere"] == []
