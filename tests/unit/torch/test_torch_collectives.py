"""NaN and infinite values of any type are found; values that are only large are not."""

from __future__ import annotations

import pytest
import torch

from hvd_estimators.torch.collectives import not_finite

INF, NAN = float("inf"), float("nan")


def module(dtype: torch.dtype, value: float, at: int) -> torch.nn.Module:
    """Return a module of two parameters, with a given value in the second."""
    made = torch.nn.Module()
    made.first = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    second = torch.linspace(-1, 1, 10_001).to(dtype)
    second[at] = value
    made.second = torch.nn.Parameter(second)
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_single_nan_or_infinity_is_found_anywhere(dtype: torch.dtype, value: float) -> None:
    for at in (0, 5_000, 10_000):
        assert not_finite(module(dtype, value, at), []) == (None, ["second"])
    both = module(dtype, INF, 7)
    both.second.data[8] = -INF
    assert not_finite(both, [None]) == (None, ["second"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_values_with_an_overflowing_sum_are_finite(dtype: torch.dtype) -> None:
    large = module(dtype, 1.0, 0)
    large.second.data.fill_(torch.finfo(dtype).max)
    assert not_finite(large, [torch.tensor(1.0)]) == (None, [])


def test_losses_are_checked_too() -> None:
    fine = module(torch.float32, 0.0, 0)
    assert not_finite(fine, [torch.tensor(1.0), None, torch.tensor(-INF)]) == (-INF, [])
    assert not_finite(torch.nn.Module(), []) == (None, [])
