"""What losses of torch tell about outputs and labels."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional

from hvd_estimators.torch.loss import kind_of_outputs, takes_class_indices


class Weighted(torch.nn.CrossEntropyLoss):
    """Subclass that computes as its base class."""


class Own(torch.nn.CrossEntropyLoss):
    """Subclass with a computation of its own."""

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).abs().mean()


OF_BINARY_PROBABILITIES = ("probabilities", "multilabel_probabilities", "probabilities")


@pytest.mark.parametrize(
    ("loss", "of_number", "of_vector", "unknown"),
    [
        (torch.nn.CrossEntropyLoss(), None, "logits", "logits"),
        (Weighted(), None, "logits", "logits"),
        (Own(), None, None, None),
        (
            functools.partial(functional.cross_entropy, label_smoothing=0.1),
            None,
            "logits",
            "logits",
        ),
        (functional.nll_loss, None, "log_probabilities", "log_probabilities"),
        (torch.nn.BCEWithLogitsLoss(), "logits", "multilabel_logits", "logits"),
        (functional.binary_cross_entropy, *OF_BINARY_PROBABILITIES),
        (torch.nn.MultiLabelSoftMarginLoss(), "logits", "multilabel_logits", "logits"),
        (torch.nn.SmoothL1Loss(), "values", None, None),
        (functional.mse_loss, "values", None, None),
        (lambda output, label: (output - label).mean(), None, None, None),
    ],
)
def test_kinds(loss: Any, of_number: Any, of_vector: Any, unknown: Any) -> None:
    assert {kind_of_outputs(loss, shape) for shape in ((), (1,))} <= {of_number, unknown}
    assert kind_of_outputs(loss, ()) == of_number
    assert kind_of_outputs(loss, (4,)) == of_vector
    assert kind_of_outputs(loss, (4, 2)) is None
    assert kind_of_outputs(loss, None) == unknown


def test_losses_of_class_indices() -> None:
    taking = [torch.nn.NLLLoss(), functional.cross_entropy, Weighted(reduction="sum")]
    assert all(map(takes_class_indices, taking))
    assert not any(map(takes_class_indices, [Own(), functional.mse_loss, torch.nn.BCELoss(), abs]))
