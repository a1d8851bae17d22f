"""Objectives of torch without an estimator."""

from __future__ import annotations

from typing import Any

from hvd_estimators.torch.objective import Objective
from hvd_estimators.torch.tensors import TensorSpec


def objective_of(
    tensors: TensorSpec, *losses: Any, joint: bool = False, metrics: tuple[Any, ...] = ()
) -> Objective:
    """Return an objective of one loss per label, or of a joint loss, or without a loss."""
    return Objective(
        tensors,
        losses or None,
        None,
        (1.0,) * len(losses),
        tuple((metric,) for metric in metrics),
        None,
        joint,
    )
