"""How a loss reduces rows, found from a batch and its halves."""

from __future__ import annotations

import math

import pytest

from hvd_estimators.training.row_weights import reduction_of

OF_ROWS = [4.0, 1.0, 7.0, 2.0, 6.0]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda rows: sum(rows) / len(rows), "mean"),
        (sum, "sum"),
        (lambda rows: sum(rows) / 5, "sum"),
        (lambda rows: 3.0, "mean"),
        (lambda rows: 0.0, "mean"),
        (max, None),
        (lambda rows: sum(r * r for r in rows) / sum(rows), None),
        (lambda rows: math.nan if len(rows) == 2 else 1.0, "mean"),
        (lambda rows: math.inf, "mean"),
    ],
)
def test_a_loss_is_a_mean_a_sum_or_neither(loss: object, expected: str | None) -> None:
    assert callable(loss)
    whole, first, second = loss(OF_ROWS), loss(OF_ROWS[:2]), loss(OF_ROWS[2:])
    assert reduction_of(whole, (first, second), (2, 3)) == expected


def test_a_random_loss_is_compared_with_more_tolerance() -> None:
    assert reduction_of(1.0, (0.9, 1.3), (2, 3)) is None
    assert reduction_of(1.0, (0.9, 1.3), (2, 3), tolerance=0.25) == "mean"
    assert reduction_of(1.0, (0.5, 0.7), (2, 3), tolerance=0.25) == "sum"
