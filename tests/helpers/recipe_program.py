"""Results of ``deploy/train.py``, and the same training without torch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def result_of(output: str) -> dict[str, Any]:
    """Return the line of JSON in the program's output, after checking its predictions."""
    result: dict[str, Any] = json.loads(output[output.index('{"driver"') :].splitlines()[0])
    xs, predicted = map(np.array, zip(*result["predictions"], strict=True))
    np.testing.assert_allclose(predicted, trained_by_numpy(xs), rtol=1e-4)
    return result


def trained_by_numpy(xs: np.ndarray) -> np.ndarray:
    """Return predictions after gradient descent over all rows, from zero."""
    x = np.arange(256) / 256
    weight = bias = 0.0
    for _ in range(30):
        error = weight * x + bias - x * x
        weight, bias = weight - 0.2 * np.mean(error * x), bias - 0.2 * np.mean(error)
    return weight * xs + bias
