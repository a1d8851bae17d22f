"""Params, rows and modules that the fits of tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def exact_params(backend: Any, store: Any, **params: Any) -> dict[str, Any]:
    """Return params of a fit that is compared with one process: rows in order, the given rate."""
    return {
        **{"backend": backend, "store": store},
        **{"feature_cols": ["features"], "label_cols": ["label"]},
        **{"shuffle": False, "scale_learning_rate": False},
        **{"random_seed": 3, "verbose": 0},
        **params,
    }


def line_estimator(store: Any, width: int = 1, lr: float = 0.01, **params: Any) -> Any:
    """Return a torch estimator of y from x, by a linear net and the squared error."""
    from hvd_estimators.torch import TorchEstimator

    torch.manual_seed(0)
    net = params.pop("model", None) or torch.nn.Linear(width, 1)
    given = {
        **{"store": store, "model": net},
        "optimizer": torch.optim.SGD(net.parameters(), lr=lr),
        "loss": torch.nn.functional.mse_loss,
        **{"feature_cols": ["x"], "label_cols": ["y"], "input_shapes": [[-1, width]]},
        **{"random_seed": 1, "verbose": 0},
    }
    if "backend" not in params:
        given["num_proc"] = 1
    return TorchEstimator(**{**given, **params})


def plane_rows(spark: Any, rows: int = 200) -> Any:
    """Return rows of y = 2 a - 3 b + 1, with a column of rows to validate on."""
    columns = ["(id * 37 % 101) / 101 as a", "(id * 53 % 103) / 103 as b", "id % 5 = 0 as held_out"]
    return spark.range(rows).selectExpr("id", *columns).selectExpr("*", "2 * a - 3 * b + 1 as y")


class Sum(torch.nn.Module):
    """Weighted sum of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor, day: torch.Tensor) -> torch.Tensor:
        return self.weights[0] * x + self.weights[1] * day


def sum_estimator(store: Any, **params: Any) -> Any:
    """Return a torch estimator of y from x and day, whose weights begin at zero."""
    columns = {"feature_cols": ["x", "day"], "input_shapes": None}
    return line_estimator(store, model=Sum(), lr=0.05, num_proc=2, **columns, **params)


class Noting(torch.nn.Module):
    """Return the sum of each row's numbers, and log the number of rows to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{len(inputs[0])}\n")
        return torch.stack([x.reshape(len(x), -1).sum(1) for x in inputs]).sum(0)
