"""Losses and metrics of a trained Keras model on rows of a DataFrame.

`load_evaluator` runs in an executor's Python worker, and `combine` on the driver. Both run the
model's ``test_step`` as validation in training does, without Horovod.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators._util.random_state import kept_random_state
from hvd_estimators.data.arrays import Array, num_rows
from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.batch import DEFAULT_RESOURCES, Resources
from hvd_estimators.inference.errors import described, naming_inputs
from hvd_estimators.keras.backend import (
    CPU,
    config,
    configure,
    has_own_test_step,
    on_tensorflow,
    traced,
)
from hvd_estimators.keras.denominators import denominators_of
from hvd_estimators.keras.metrics import (
    capture_metrics,
    check_metrics,
    is_known,
    leaf_metrics,
    merge_captured,
    results,
)
from hvd_estimators.keras.predictor import choose_device
from hvd_estimators.keras.serialization import load, load_model
from hvd_estimators.keras.tensors import TensorSpec
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.loading.collate_fn import BatchNames

# Rows with which the driver checks metrics.
_CHECKED_ROWS = 22


class EvaluationSteps:
    """Test steps of a model that sum its losses and metrics.

    Parameters
    ----------
    document : bytes or path
        Result of `hvd_estimators.keras.serialization.model_payload`.
    compiled : bytes
        The model's compile arguments without the optimizer, or None for a model that is loaded
        compiled; see `hvd_estimators.keras.serialization.dump`.
    tensors : TensorSpec
        Conversion of columns to tensors.
    device : str
        The backend's device, see `choose_device`.

    Attributes
    ----------
    model : keras.Model
        The model, compiled. `reset` and `run` change its metrics.
    """

    def __init__(
        self,
        document: bytes | os.PathLike[str],
        compiled: bytes,
        tensors: TensorSpec,
        device: str = CPU,
    ) -> None:
        self._device, self._tensors = device, tensors
        self._features = tuple(field.column for field in keras.tree.flatten(tensors.inputs))
        with keras.device(device):
            self.model = load_model(document)
            arguments = load(compiled)
            if arguments is not None:
                self.model.compile(**arguments)
        self._denominators = denominators_of(self.model)
        self._is_built = False
        step = self._step
        self._traced = step if self.model.run_eagerly and on_tensorflow() else traced(step)

    def start(self) -> KerasSums:
        """Return sums over no rows."""
        return KerasSums(self)

    def columns(self, given: Mapping[str, Array] | CollatedBatch) -> Mapping[str, Array]:
        """Return the columns of a batch, which a collate function may have made."""
        if not isinstance(given, CollatedBatch):
            return given
        labels = tuple(field.column for field in self._tensors.label_fields())
        names = BatchNames(self._features, labels, self._tensors.sample_weight_col)
        return {name: np.asarray(array) for name, array in names.columns(given).items()}

    def reset(self, columns: Mapping[str, Array]) -> None:
        """Reset the metrics, after they were built from the first of some rows."""
        if not self._is_built:
            with keras.device(self._device):
                self._step(self._tensors.arrays({n: a[:1] for n, a in columns.items()}))
            self._is_built = True
        self.model.reset_metrics()

    def check_sums(self, rows: Sequence[Mapping[str, Array]]) -> None:
        """Check that metrics of several partitions can be added up, and reset them.

        Parameters
        ----------
        rows : sequence of mapping
            One row of each partition.
        """
        model = self.model
        # An own test step may call the metrics in another way.
        if has_own_test_step(model) or all(map(is_known, leaf_metrics(model))):
            return
        first, *others = rows[:_CHECKED_ROWS]
        shapes = {name: array.shape for name, array in first.items()}
        fitting = [o for o in others if {name: a.shape for name, a in o.items()} == shapes]
        # Rows of other lengths are left out.
        joined = [first, *(fitting or [first])]
        batch = {name: np.concatenate([each[name] for each in joined]) for name in first}
        with keras.device(self._device):
            x, y, weights = keras.utils.unpack_x_y_sample_weight(self._tensors.arrays(batch))
            if y is not None:
                check_metrics(model, x, y, model(x, training=False), weights)

    def run(self, columns: Mapping[str, Array]) -> None:
        """Add a batch to the metrics."""
        with naming_inputs(lambda: described(columns)), keras.device(self._device):
            self._traced(self._tensors.arrays(columns))

    def _step(self, batch: Any) -> Any:
        with self._denominators.in_step(batch, False):
            return self.model.test_step(batch)


def load_evaluator(
    document: bytes | os.PathLike[str],
    resources: Resources = DEFAULT_RESOURCES,
    *,
    compiled: bytes,
    tensors: TensorSpec,
    settings: Mapping[str, Any],
) -> EvaluationSteps:
    """Load the evaluator of a compiled model in a Python worker.

    Parameters
    ----------
    document, compiled, tensors
        See `EvaluationSteps`.
    resources : Resources
        Threads and GPU.
    settings : dict
        Keras's settings during training.
    """
    device = choose_device(resources)
    configure(settings)
    return EvaluationSteps(document, compiled, tensors, device)


class KerasSums:
    """States of a model's metrics over the rows of a partition."""

    def __init__(self, steps: EvaluationSteps) -> None:
        self._steps = steps
        self._rows = 0
        self._first: dict[str, Array] = {}

    def add(self, given: dict[str, Array] | CollatedBatch) -> None:
        """Evaluate a batch."""
        columns = self._steps.columns(given)
        if not self._rows:
            self._first = {name: array[:1].copy() for name, array in columns.items()}
            self._steps.reset(columns)
        self._rows += num_rows(dict(columns))
        self._steps.run(columns)

    def state(self) -> tuple[int, dict[str, Array], Any]:
        """Return the number of rows, the first row, and the states of the metrics."""
        captured = capture_metrics(self._steps.model) if self._rows else None
        return self._rows, self._first, captured


def combine(
    document: bytes | os.PathLike[str],
    states: Sequence[tuple[int, dict[str, Array], Any]],
    *,
    compiled: bytes,
    tensors: TensorSpec,
    settings: Mapping[str, Any],
) -> tuple[int, dict[str, Any]]:
    """Return the number of rows and the values by name, given the states of all partitions."""
    measured = [state for state in states if state[0]]
    if not measured:
        return 0, {}
    with kept_random_state(), _using(settings):
        steps = EvaluationSteps(document, compiled, tensors)
        # The row builds the metrics, which have names only then.
        steps.reset(measured[0][1])
        if len(measured) > 1:
            steps.check_sums([row for _, row, _ in measured])
        merge_captured(steps.model, [captured for _, _, captured in measured])
        values = results(steps.model)
        if not values:
            raise ParamError(
                "model: its test_step() updates no metric, and evaluate() merges metrics over the "
                "rows. Update a keras.metrics.Mean in test_step()."
            )
        return sum(rows for rows, _, _ in measured), values


@contextlib.contextmanager
def _using(settings: Mapping[str, Any]) -> Iterator[None]:
    before = config()
    configure(settings)
    try:
        yield
    finally:
        configure(before)
