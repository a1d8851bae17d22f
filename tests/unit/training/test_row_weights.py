"""How a loss reduces rows, found from a batch and its halves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hvd_estimators.training.row_weights import compare_halves

OF_ROWS = [4.0, 1.0, 7.0, 2.0, 6.0]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda rows: sum(rows) / len(rows), "mean"),
        (sum, "sum"),
        (lambda rows: sum(rows) / 5, "sum"),
        (lambda rows: 3.0, "mean"),
        (lambda rows: 0.0, "mean"),
        (max, "other"),
        (lambda rows: sum(r * r for r in rows) / sum(rows), "other"),
        (lambda rows: math.nan if len(rows) == 2 else 1.0, "mean"),
        (lambda rows: math.inf, "mean"),
    ],
)
def test_a_loss_is_a_mean_a_sum_or_neither(loss: Any, expected: str) -> None:
    def losses_of(rows: slice) -> list[float | None]:
        return [loss(OF_ROWS[rows]), None]

    assert compare_halves(losses_of, len(OF_ROWS)) == [expected, "mean"]


def test_a_loss_that_differs_between_equal_calls_counts_as_a_mean() -> None:
    def compared(*values: float) -> list[str]:
        found = iter(values)
        return compare_halves(lambda rows: [next(found)], 5)

    assert compared(1.0, 1.0, 0.9, 1.3) == ["other"]
    assert compared(1.0, 1.0, 0.4, 0.6) == ["sum"]
    for values in ((0.9, 1.3), (5.0, 1.3), (0.4, 0.6)):
        assert compared(1.0, 1.1, *values) == ["mean"]


def test_losses_that_fail_on_some_rows_are_not_compared() -> None:
    assert compare_halves(lambda rows: [1.0 / (5 - (rows.start or 0) - 3)], 5) == []
    assert compare_halves(lambda rows: [1.0], 1) == []
