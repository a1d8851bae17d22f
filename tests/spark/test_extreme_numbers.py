"""Every type of numbers at its ends, from fit to load_predictor: the same values, or an error."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import line_estimator

from hvd_estimators.launch import LocalBackend
from hvd_estimators.torch import load_predictor

pytestmark = pytest.mark.spark

ENDS: dict[str, tuple[str, list[Any]]] = {
    **{name: (name, [-(2**n), 2**n - 1]) for name, n in (("tinyint", 7), ("smallint", 15))},
    **{name: (name, [-(2**n), 2**n - 1]) for name, n in (("int", 31), ("bigint", 63))},
    "boolean": ("boolean", [False, True]),
    "float": ("float", np.array([-1, 1], np.float32) * np.finfo(np.float32).max),
    "double": ("double", [-1.7e308, 1.7e308]),
    "whole": ("decimal(18,0)", [Decimal(-(10**18) + 1), Decimal(10**18 - 1)]),
    "long whole": ("decimal(38,0)", [Decimal(-(2**53) - 1), Decimal(2**53 + 1)]),
    "money": ("decimal(10,2)", [Decimal("-99999999.99"), Decimal("99999999.99")]),
    "longs": ("array<bigint>", [[-(2**63)], [2**63 - 1]]),
    "doubles": ("array<double>", [[-1.7e308], [1.7e308]]),
}
EXACT = {"int": "int64", "bigint": "int64", "double": "float64", "whole": "int64"}
EXACT |= {"money": "float64", "longs": "int64", "doubles": "float64"}


class Only(torch.nn.Module):
    """Return the position of each number among those that it knows; fail for any other."""

    def __init__(self, known: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.known = known
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        found = []
        for (name, known), given in zip(self.known.items(), inputs, strict=True):
            # The dry run tries zeros.
            if not (torch.isin(given, known) | (given == 0)).all():
                raise ValueError(f"{name} is {given.tolist()}, not {known.tolist()}")
            found.append((given.reshape(-1) == known[1]).float())
        return torch.stack(found, 1) + 0 * self.weight


def frame_of(spark: Any, names: list[str]) -> Any:
    rows = list(zip(*(ENDS[name][1] for name in names), [0.0, 1.0], strict=True))
    rows = [tuple(v.item() if isinstance(v, np.generic) else v for v in row) for row in rows]
    schema = ", ".join(f"`{name}` {ENDS[name][0]}" for name in names)
    return spark.createDataFrame(rows, f"{schema}, y double").coalesce(1)


def mean_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((outputs - labels.reshape(-1, 1)) ** 2).mean()


def test_ends_of_types_keep_their_values(spark: Any, store: Any, tmp_path: Path) -> None:
    names = [name for name in ENDS if name != "long whole"]
    known = {
        name: torch.tensor(np.array(ENDS[name][1]).reshape(-1).tolist(), dtype=torch.float32)
        if name not in EXACT
        else torch.tensor(
            [float(v) if EXACT[name] == "float64" else int(v) for v in np.ravel(ENDS[name][1])],
            dtype=getattr(torch, EXACT[name]),
        )
        for name in names
    }
    frame = frame_of(spark, names)
    params = {"feature_cols": names, "input_shapes": None, "column_dtypes": EXACT}
    params |= {"backend": LocalBackend(1), "loss": mean_error, "batch_size": 2}
    model = line_estimator(store, model=Only(known), **params).fit(frame)

    rows = model.transform(frame).select("y", "y__output").collect()
    assert [row[1].toArray().tolist() for row in rows] == [[row[0]] * len(names) for row in rows]
    model.write().overwrite().save(str(tmp_path / "model"))
    given = [dict(zip(names, [ENDS[name][1][i] for name in names], strict=True)) for i in (0, 1)]
    predicted = load_predictor(str(tmp_path / "model")).predict(given)
    assert [row["y__output"].tolist() for row in predicted] == [
        [0.0] * len(names),
        [1.0] * len(names),
    ]
