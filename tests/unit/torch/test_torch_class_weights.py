"""Class weights of torch, compared with a loop over rows."""

from __future__ import annotations

import pytest
import torch

from hvd_estimators.exceptions import ShapeError
from hvd_estimators.torch.objective import class_weights

WEIGHTS = {2: 0.25, 0: 3.0, 7: 0.0}


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1, 2, 3, 7, 2, 9, -1]),
        torch.tensor([[2.0], [0.0], [1.0], [7.0]]),
        torch.eye(8)[[7, 2, 2, 0, 5]],
        torch.tensor([], dtype=torch.int64),
    ],
    ids=["numbers", "floats", "one-hot", "no rows"],
)
def test_weights_of_rows(labels: torch.Tensor) -> None:
    classes = [int(row.argmax() if row.numel() > 1 else row) for row in labels]
    expected = [WEIGHTS.get(number, 1.0) for number in classes]
    assert class_weights(labels, WEIGHTS).tolist() == expected


def test_rows_of_several_dimensions_are_rejected() -> None:
    with pytest.raises(ShapeError, match=r"class_weight: .* rows of shape \(3, 3\)"):
        class_weights(torch.zeros(2, 3, 3), WEIGHTS)
