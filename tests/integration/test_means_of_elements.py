"""Means over the elements of labels of any length are those over all ranks and parts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from estimators import exact_params
from pyarrow import parquet
from rank_pool import shared_ranks

from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

LENGTHS = [1, 4, 2, 9, 3, 1, 1, 2]
"""Elements of each row; two ranks have four rows each."""
RATE, EPOCHS = 0.1, 2


def setup_module() -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Line(torch.nn.Module):
    """The same line for all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Parameter(torch.tensor([0.5, -0.25]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line[0] * x + self.line[1]


def make_rows() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(2)
    x = [rng.normal(size=length) for length in LENGTHS]
    return x, [2 * row + 1 + rng.normal(size=len(row)) for row in x]


def padded(rows: list[np.ndarray]) -> np.ndarray:
    longest = max(map(len, rows))
    return np.concatenate([np.pad(row, (0, longest - len(row))) for row in rows])


def line_of(steps: list[list[list[int]]]) -> np.ndarray:
    """Descend along the mean squared error over all elements, padded within each group of rows."""
    x, y = make_rows()
    line = np.array([0.5, -0.25])
    for groups in steps * EPOCHS:
        inputs, labels = (
            np.concatenate([padded([values[row] for row in group]) for group in groups])
            for values in (x, y)
        )
        errors = 2 * (line[0] * inputs + line[1] - labels) / len(labels)
        line = line - RATE * np.array([errors @ inputs, errors.sum()])
    return line


# Batches of two rows on each rank.
OF_RANKS = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
SINGLE = [[[row] for group in step for row in group] for step in OF_RANKS]
PADDING = {"padding": {"x": 0, "y": 0}}
PARTS = {"batch_size_fn": lambda row: len(row["x"]), "max_batch_size": 1}


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        (PADDING, OF_RANKS),
        ({**PADDING, "backward_passes_per_step": 2}, [[*OF_RANKS[0], *OF_RANKS[1]]]),
        # Rows that are parts by themselves need no padding.
        ({**PADDING, **PARTS}, SINGLE),
    ],
)
@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, torch.nn.MSELoss()])
def test_weights_are_those_of_the_mean_over_all_elements(
    params: dict[str, Any], steps: Any, loss: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = make_rows()
    folder = Path(store.get_train_data_path())
    folder.mkdir(parents=True)
    parquet.write_table(pa.table({"x": x, "y": y}), folder / "part-0.parquet")
    net = Line()
    settings = {
        **exact_params(shared_ranks(2), store),
        **{"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 2, "epochs": EPOCHS},
        **{"model": net, "optimizer": torch.optim.SGD(net.parameters(), RATE), "loss": loss},
        **params,
    }
    model = TorchEstimator(**settings).fit_on_parquet()
    found = model.getModel().line.detach().numpy()
    np.testing.assert_allclose(found, line_of(steps), rtol=1e-4)
    assert (
        "padding: the label 'y' is padded, and its loss is a mean over all elements" in caplog.text
    )
