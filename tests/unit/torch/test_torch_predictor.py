"""Forward passes for predictions: precision, types and failures."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from hvd_estimators.exceptions import PredictionError, ShapeError
from hvd_estimators.inference.batch import Resources
from hvd_estimators.torch import TorchModel

ROWS = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    hidden = torch.nn.Linear(8, 32)
    return torch.nn.Sequential(hidden, torch.nn.Tanh(), torch.nn.Linear(32, 3))


def predictor(module: torch.nn.Module, **params: Any) -> Any:
    given = {"feature_columns": ["x"], "label_columns": ["y"], **params}
    document, load = TorchModel(model=module, **given)._make_predictor()
    return load(document)


# Rounding of the format and of some sums.
@pytest.mark.parametrize(("precision", "digits"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_half_precision_agrees_with_float32_within_rounding(precision: str, digits: float) -> None:
    module = net()
    exact = module(torch.from_numpy(ROWS)).detach().numpy()

    (found,) = predictor(module, inference_precision=precision)([ROWS])

    assert found.dtype == np.float32
    error = np.abs(found - exact).max()
    assert digits / 64 < error < 4 * digits
    (same,) = predictor(module)([ROWS])
    np.testing.assert_array_equal(same, exact)


def test_numbers_of_any_type_are_kept() -> None:
    class Types(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            whole = x.sum(1)
            return whole.half(), whole.bfloat16(), whole.long(), whole > 0, whole.double()

    found = predictor(Types(), label_columns=list("abcde"))([ROWS])

    kinds = (torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float64)
    total = torch.from_numpy(ROWS).sum(1)
    for array, dtype in zip(found, kinds, strict=True):
        np.testing.assert_array_equal(
            array, total.gt(0) if dtype is torch.bool else total.to(dtype).double()
        )


def test_integers_beyond_those_of_doubles_are_kept() -> None:
    class Ids(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.full((len(x),), 2**53 + 1)

    (found,) = predictor(Ids())([ROWS])
    assert found.tolist() == [2**53 + 1] * len(ROWS)


def test_complex_outputs_are_an_error_instead_of_losing_their_imaginary_parts() -> None:
    class Spectrum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.fft.rfft(x), x

    with pytest.raises(ShapeError, match=r"outputs: .*complex numbers.*view_as_real"):
        predictor(Spectrum(), label_columns=[])([ROWS])
    (found,) = predictor(Spectrum(), label_columns=[], outputs=[1])([ROWS])
    np.testing.assert_array_equal(found, ROWS)


def test_outputs_do_not_change_when_the_module_reuses_its_buffers() -> None:
    class Holding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.held += 1
            return self.held[: len(x)]

    holding = predictor(Holding())
    first, second = holding([ROWS]), holding([ROWS])
    assert (first[0][0], second[0][0]) == (1, 2)


class Force(torch.nn.Module):
    """Module that returns a gradient of its output and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = torch.nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return torch.autograd.grad((self.energy(x) ** 2).sum(), x)[0]


def test_forward_passes_that_inference_mode_does_not_allow() -> None:
    module = Force()
    weight = module.energy.weight.detach().numpy()
    expected = 2 * (ROWS @ weight.T + module.energy.bias.item()) * weight

    found = predictor(module)
    for _ in range(3):
        np.testing.assert_allclose(found([ROWS])[0], expected, atol=1e-5)
    # The first batch runs twice.
    assert found._module.calls == 4

    sparse = net()
    exact = sparse(torch.from_numpy(ROWS)).detach().numpy()
    sparse[0].weight = torch.nn.Parameter(sparse[0].weight.detach().to_sparse_csr())
    np.testing.assert_allclose(predictor(sparse)([ROWS])[0], exact, atol=1e-6)


def test_errors_in_forward_describe_the_inputs() -> None:
    shaped = predictor(net(), input_shapes=[[2, 4]])
    with pytest.raises(PredictionError) as failed:
        shaped([ROWS])
    message = str(failed.value)
    assert "called with x (64, 2, 4) float32, and takes x (2, 4) per row (input_shapes)" in message
    assert re.search(r"raised RuntimeError: mat1 .* \(.*, line \d+, in forward\)", message)
    assert isinstance(failed.value.__cause__, RuntimeError)
    # Inputs that do not fit the configured shape are reported in their original shape.
    with pytest.raises(PredictionError, match=r"called with x \(64, 5\) float32, and takes"):
        shaped([ROWS[:, :5]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_predictions_agree_with_cpu_predictions() -> None:
    document, load = TorchModel(
        model=net(), feature_columns=["x"], label_columns=["y"]
    )._make_predictor()
    cpu, gpu = load(document), load(document, Resources(gpu=0))
    assert gpu.overlaps
    begun = [gpu.begin([ROWS[i:]]) for i in range(8)]
    for i, finish in enumerate(begun):
        np.testing.assert_allclose(finish()[0], cpu([ROWS[i:]])[0], rtol=1e-3, atol=1e-3)
