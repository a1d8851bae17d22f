"""Losses and metrics of a trained torch module on rows of a DataFrame.

`objective_of` and `combine` run on the driver; `TorchEvaluator` runs in an executor's Python
worker.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.batch import FRAMEWORKS_CHOICE, Resources
from hvd_estimators.inference.errors import described, naming_inputs
from hvd_estimators.torch.loss import check_weightable
from hvd_estimators.torch.metrics import MetricSums
from hvd_estimators.torch.objective import Objective, RankObjective, check_joint
from hvd_estimators.torch.objective_args import loss_weights, losses, metric_groups
from hvd_estimators.torch.optimizer_step import autocast
from hvd_estimators.torch.predictor import Forward
from hvd_estimators.torch.serialization import load_module, load_with_references, plain_module
from hvd_estimators.torch.tensors import TensorSpec

_OFFERED = ("model", "device", "rank", "size")
"""Arguments of loss constructors in an evaluation."""


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
            "metrics is not set: an earlier version saved this model, or it was not fitted. Set "
            "metrics ([] for the loss alone) and loss, and loss_weights, sample_weight_col and "
            "label_shapes if training used them."
        )
    names, is_joint = tensors.label_cols, get("loss_form") == "joint"
    given = {
        name: losses(name, get(name), len(names), is_joint)
        for name in ("loss", "loss_constructors")
    }
    if given["loss"] is None and given["loss_constructors"] is None:
        raise ParamError(
            "loss is not set: the model's train_minibatch_fn computed its own, or an earlier "
            "version saved the model. Set loss."
        )
    if given["loss"] is not None:
        is_weighted = get("sample_weight_col") is not None
        if is_joint:
            check_joint(given["loss"][0], is_weighted)
        elif is_weighted:
            check_weightable(given["loss"])
    for function in () if given["loss"] is not None else given["loss_constructors"] or ():
        _check_constructor(function)
    shapes = get("label_shapes")
    return Objective(
        tensors=replace(
            tensors,
            sample_weight_col=get("sample_weight_col"),
            label_shapes=tuple(map(tuple, shapes)) if shapes else None,
            pairs=bool(names) and not is_joint,
        ),
        losses=given["loss"],
        loss_constructors=given["loss_constructors"],
        loss_weights=loss_weights(get("loss_weights"), len(names)),
        metrics=metric_groups(get("metrics"), len(names)),
        train_minibatch_fn=None,
        joint=is_joint,
        upstream_names=get("_upstream_names"),
    )


def _check_constructor(function: Callable[..., Any]) -> None:
    """Check that a loss constructor needs no more than evaluation offers."""
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in _OFFERED
    ]
    if needed:
        raise ParamError(
            f"loss_constructors: found one that needs {', '.join(needed)}, which only training "
            f"has; evaluate() offers {', '.join(_OFFERED)}. Set loss to the loss of the training."
        )


class TorchEvaluator:
    """A module with its losses and metrics.

    Parameters
    ----------
    document : bytes or path
        Result of `hvd_estimators.torch.serialization.module_payload`.
    objective : bytes
        An `Objective`, see `hvd_estimators.torch.serialization.dump_with_references`.
    precision : str
        Precision of validation in training, see ``precision``.
    resources : Resources
        Threads and GPU.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str],
        objective: bytes,
        precision: str,
        resources: Resources = FRAMEWORKS_CHOICE,
    ) -> None:
        forward = Forward("float32", resources)
        self._device = forward.device
        module = plain_module(load_module(document, mapped=True)).eval()
        self._module = forward.placed(module)
        # References to the optimizer are None: losses and metrics do not step it.
        loaded: Objective = load_with_references(objective, self._module, None)
        self._tensors = loaded.tensors
        self._precision = precision
        self._objective = loaded.on_rank(self._device, model=self._module, rank=0, size=1)

    def start(self) -> TorchSums:
        """Return sums over no rows."""
        return TorchSums(self._evaluate, self._objective)

    def _evaluate(self, columns: dict[str, Array]) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(naming_inputs(lambda: described(columns)))
            if self._device.type == "cuda":
                # Covers tensors that a module creates on "cuda".
                stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(autocast(self._precision, self._device.type))
            stack.enter_context(torch.no_grad())
            batch = self._tensors.batch(columns, self._device)
            return self._objective.evaluate(self._module, batch)


class TorchSums:
    """Sums of loss and metrics of a partition."""

    def __init__(
        self, evaluate: Callable[[dict[str, Array]], Any], objective: RankObjective
    ) -> None:
        self._evaluate = evaluate
        self._parts = objective.loss_parts
        self._sums = MetricSums(objective.metrics, self._parts)

    def add(self, columns: dict[str, Array]) -> None:
        """Evaluate a batch."""
        self._sums.add(self._evaluate(columns))

    def state(self) -> tuple[int, dict[str, Any]]:
        """Return the number of the loss's denominators, and the sums."""
        return self._parts, self._sums.state()


def combine(
    objective: Objective, states: Sequence[tuple[int, dict[str, Any]]]
) -> tuple[int, dict[str, Any]]:
    """Return the number of rows and the values by name, given the states of all partitions."""
    if not states:
        return 0, {}
    metrics = objective.named_metrics
    sums = MetricSums(metrics, states[0][0])
    sums.restore([state for _, state in states])
    values = sums.values()
    named = {name: value for group in metrics.by_group(values) for name, value in group.items()}
    return sums.rows, {"loss": values["loss"], **named}
