"""Losses, loss weights and metrics of params, as tuples of the objective. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import functions


def per_label(name: str, given: Any, labels: int) -> list[Any]:
    """Return a param's callables, one per label; a single callable serves all labels.

    Raises
    ------
    ParamError
        If the number of callables is neither 1 nor that of the labels.
    """
    given = functions(name, given)
    if len(given) not in (1, labels):
        raise ParamError(f"{name}: expected 1 or one per label, {labels}, found {len(given)}.")
    return given * labels if len(given) == 1 else given


def losses(name: str, given: Any, labels: int, is_joint: bool) -> tuple[Any, ...] | None:
    """Return a param's callables, one per label, or a joint one; None if it is not set."""
    if given is None:
        return None
    return tuple(functions(name, given) if is_joint else per_label(name, given, labels))


def loss_weights(given: Sequence[float] | None, labels: int) -> tuple[float, ...]:
    """Return the weight of each label's loss."""
    labels = max(labels, 1)
    return tuple(given or [1.0 / labels] * labels)


def metric_groups(given: Any, labels: int) -> tuple[tuple[Any, ...], ...]:
    """Return metrics as groups; a single metric is a group of one.

    Raises
    ------
    ParamError
        If a metric is not a callable object, or if a group has another size.
    """
    groups = []
    if callable(given):
        given = [given]
    if not isinstance(given, (list, tuple)):
        raise ParamError(
            "metrics: expected a list of functions, or of metrics of torchmetrics, found "
            f"{given!r}."
        )
    for group in given:
        members = functions("metrics", group)
        if len(members) not in (1, labels):
            raise ParamError(
                f"metrics: expected groups of 1 or of one per label, {labels}, found a group "
                f"of {len(members)}."
            )
        for member in members:
            if isinstance(member, type) and issubclass(member, torch.nn.Module):
                raise ParamError(
                    f"metrics: found the class {member.__name__}. Set an object of it, "
                    f"{member.__name__}()."
                )
        groups.append(tuple(members))
    return tuple(groups)
