"""Evaluation of a model on a DataFrame: each partition returns sums, which the driver combines.

`hvd_estimators.model` creates the columns. `evaluate_partitions` runs on the driver, the evaluation
of a partition on executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import cloudpickle
import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import first_imports
from hvd_estimators.data.arrays import Array, num_rows
from hvd_estimators.inference.batch import BatchPredictor
from hvd_estimators.inference.broadcast import Hashed
from hvd_estimators.inference.udf import Send
from hvd_estimators.inference.worker import (
    cached_predictor,
    predictor_key,
    task_resources,
    unpickled,
)
from hvd_estimators.launch.cluster.jobs import collect_results
from hvd_estimators.loading.collate import CollatedBatch

NULL_REMEDY = "fill or drop them before evaluate(), or set handleInvalid='skip' to leave them out."


class PartitionSums(Protocol):
    """Sums of losses and metrics over the batches of a partition."""

    def add(self, columns: dict[str, Array] | CollatedBatch) -> None:
        """Evaluate a batch."""

    def state(self) -> Any:
        """Return the sums as an object that can be pickled."""


class Evaluator(Protocol):
    """A loaded model with its losses and metrics. A Python worker keeps it for several tasks."""

    def start(self) -> PartitionSums:
        """Return sums over no rows."""


def evaluate_partitions(
    frame: DataFrame,
    document: bytes | LocalFile,
    load: Callable[..., Evaluator],
    inputs: BatchPredictor,
    send: Send,
    *,
    has_empty_rows: bool = False,
) -> list[Any]:
    """Evaluate a DataFrame in a Spark job; return the state of each partition, in order.

    Parameters
    ----------
    frame : DataFrame
        The columns of ``inputs``, in their order.
    document : bytes or LocalFile
        The serialized model.
    load : callable
        Loads an `Evaluator` from the document and the `Resources` of a task.
    inputs : BatchPredictor
        Returns the evaluator's columns, after a transformation if one is set.
    send : callable
        Sends large payloads to the executors.
    has_empty_rows : bool
        Whether a further, last column is true for rows and false for empty rows.

    Raises
    ------
    HvdEstimatorsError
        If a partition's rows, or the model on them, fail.
    """
    hashed = Hashed.of(document)
    model = send("model", hashed)
    steps = send("evaluation", Hashed.of(cloudpickle.dumps((*first_imports(), load, inputs))))
    key = predictor_key(hashed, load)

    def evaluate(batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        *_, load, inputs = unpickled(steps)
        evaluator: Any = cached_predictor(key, model, load, task_resources(TaskContext.get()))
        yield _evaluated(evaluator, inputs, batches, has_empty_rows)

    return collect_results(frame, evaluate)


def _evaluated(
    evaluator: Evaluator,
    inputs: BatchPredictor,
    batches: Iterable[pa.RecordBatch],
    has_empty_rows: bool,
) -> Any:
    """Return the state of a partition."""
    sums = evaluator.start()
    for batch in batches:
        columns = list(batch.columns)
        is_row = np.asarray(columns.pop(), bool) if has_empty_rows else None
        arrays, _ = inputs.read(columns, is_row, NULL_REMEDY)
        rows = num_rows(arrays)
        step = inputs.batch_rows or max(rows, 1)
        for start in range(0, rows, step):
            part = {name: array[start : start + step] for name, array in arrays.items()}
            given: Any = inputs.inputs(part, evaluator)
            if inputs.collate is None:
                sums.add(dict(zip(inputs.features.names, given, strict=True)))
            else:
                sums.add(given[0])
    return sums.state()
