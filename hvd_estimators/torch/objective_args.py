"""Objectives from the params of estimators and of models. Runs on the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import functions
from hvd_estimators.torch.objective import Objective
from hvd_estimators.torch.tensors import TensorSpec


def make_objective(get: Callable[[str], Any], tensors: TensorSpec) -> Objective:
    """Return losses and metrics from the params of an estimator or a model.

    Parameters
    ----------
    get : callable
        Maps the name of a param to its value.
    tensors : TensorSpec
        Conversion of columns.
    """
    labels, is_joint = len(tensors.label_cols), get("loss_form") == "joint"
    return Objective(
        tensors=tensors,
        losses=losses("loss", get("loss"), labels, is_joint),
        loss_constructors=losses("loss_constructors", get("loss_constructors"), labels, is_joint),
        loss_weights=loss_weights(get("loss_weights"), labels),
        metrics=metric_groups(get("metrics"), labels),
        train_minibatch_fn=None,
        joint=is_joint,
    )


def objective_of(get: Callable[[str], Any], tensors: TensorSpec) -> Objective:
    """Return the training objective of a model's params.

    Parameters
    ----------
    get : callable
        Maps the name of a param to its value.
    tensors : TensorSpec
        Conversion of columns in `transform`.

    Raises
    ------
    ParamError
        If a param that training had is not known, or if params do not fit each other.
    """
    if get("metrics") is None:
        raise ParamError(
            "metrics is not set: the model was not fitted. Set metrics ([] for the loss alone) and "
            "loss, and loss_weights, sample_weight_col and label_shapes if training used them."
        )
    shapes = get("label_shapes")
    tensors = replace(
        tensors,
        sample_weight_col=get("sample_weight_col"),
        label_shapes=tuple(map(tuple, shapes)) if shapes else None,
        pairs=bool(tensors.label_cols) and get("loss_form") != "joint",
    )
    objective = replace(make_objective(get, tensors), upstream_names=get("_upstream_names"))
    if objective.losses is not None:
        objective.check_losses(objective.losses)
    elif objective.loss_constructors is None:
        raise ParamError(
            "loss is not set: the model's train_minibatch_fn computed its own. Set loss."
        )
    return objective


def per_label(name: str, given: Any, labels: int) -> list[Any]:
    """Return a param's callables, one per label; a single callable serves all labels.

    Raises
    ------
    ParamError
        If the number of callables is neither 1 nor the number of labels.
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
        groups.append(tuple(members))
    return tuple(groups)
