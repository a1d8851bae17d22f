"""Losses and metrics of a trained torch module on rows of a DataFrame.

`TorchEvaluator` runs in an executor's Python worker, and `combine` on the driver.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_estimators.inference.batch import DEFAULT_RESOURCES, Resources
from hvd_estimators.inference.errors import described, naming_inputs
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.store import Store
from hvd_estimators.torch.metrics import MetricSums
from hvd_estimators.torch.objective import Objective, RankObjective
from hvd_estimators.torch.optimizer_step import autocast
from hvd_estimators.torch.predictor import Forward
from hvd_estimators.torch.serialization import load_module, plain_module
from hvd_estimators.torch.stored_weights import complete
from hvd_estimators.torch.tensors import AnyColumns

LOSS_ARGUMENTS = ("model", "device", "rank", "size")
"""Arguments that loss constructors get without training."""


class TorchEvaluator:
    """A module with its losses and metrics.

    Parameters
    ----------
    document : bytes or path
        Result of `hvd_estimators.torch.serialization.module_payload` for a module and its
        `Objective`.
    precision : str
        Precision of validation in training, see ``precision``.
    resources : Resources
        Threads and GPU.
    weights_in : tuple of (Store, str), optional
        Store and folder of the module's weights, if the document has none.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str],
        precision: str,
        resources: Resources = DEFAULT_RESOURCES,
        weights_in: tuple[Store, str] | None = None,
    ) -> None:
        forward = Forward("float32", resources)
        self._device = forward.device
        module, loaded = load_module(document, mapped=True)
        self._module = forward.placed(complete(plain_module(module), weights_in).eval())
        self._tensors = loaded.tensors
        self._precision = precision
        self._objective = loaded.on_rank(self._device, model=self._module, rank=0, size=1)

    def start(self) -> TorchSums:
        """Return sums over no rows."""
        return TorchSums(self._evaluate, self._objective)

    def input_dtype(self, name: str, stored: str) -> str:
        """Return the type of an input, see `FrameworkPredictor.input_dtype`."""
        return self._tensors.dtype_name(name)

    def _evaluate(self, columns: AnyColumns) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(naming_inputs(lambda: _described(columns)))
            if self._device.type == "cuda":
                # Covers tensors that a module creates on "cuda".
                stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(autocast(self._precision, self._device.type))
            stack.enter_context(torch.no_grad())
            batch = self._tensors.batch(columns, self._device)
            return self._objective.evaluate(self._module, batch)


def _described(columns: AnyColumns) -> str:
    if isinstance(columns, CollatedBatch):
        return f"a batch of {columns.rows} rows"
    return described(columns)


class TorchSums:
    """Sums of loss and metrics of a partition."""

    def __init__(self, evaluate: Callable[[AnyColumns], Any], objective: RankObjective) -> None:
        self._evaluate = evaluate
        self._parts = objective.loss_parts
        self._sums = MetricSums(objective.metrics, self._parts)

    def add(self, columns: AnyColumns) -> None:
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
