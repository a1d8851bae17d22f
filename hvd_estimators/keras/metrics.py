"""Sum or merge the states of metrics over ranks. Used on the driver and on ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.trial import traceless
from hvd_estimators.keras.backend import has_own_step, has_own_test_step, is_keras

logger = logging.getLogger(__name__)


def leaf_metrics(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """Yield a model's metrics, including each metric that was passed to ``compile()``."""
    for metric in model.metrics:
        # Keras wraps the metrics of compile() in a single metric.
        yield from getattr(metric, "metrics", None) or [metric]


def results(model: keras.Model) -> dict[str, Any]:
    """Return the results of a model's metrics as numbers, or lists of numbers, by name.

    A model's own steps need not update Keras's mean of the loss. Means that were never updated are
    left out.
    """
    has_own = has_own_step(model) or has_own_test_step(model)
    values: dict[str, Any] = {}
    for metric in model.metrics:
        if has_own and isinstance(metric, keras.metrics.Mean) and not float(metric.count):
            continue
        result = metric.result()
        values.update(result if isinstance(result, Mapping) else {metric.name: result})
    return as_logs(values)


def as_logs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert logs as Keras's ``fit`` does: dicts are flattened, and single numbers are floats.

    Arrays with several numbers become lists of numbers.
    """
    logs: dict[str, Any] = {}
    for name, value in values.items():
        logs.update(as_logs(value) if isinstance(value, Mapping) else {name: _as_python(value)})
    return logs


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are single numbers."""
    return {name: v for name, v in as_logs(values).items() if isinstance(v, float)}


def _as_python(value: Any) -> Any:
    if "bfloat16" in str(getattr(value, "dtype", "")):
        # It is not one of NumPy's own types.
        value = keras.ops.cast(value, "float32")
    array = keras.ops.convert_to_numpy(value)
    if array.dtype.kind not in "biuf":
        return value
    return float(array.item()) if array.size == 1 else array.tolist()


def capture_metrics(model: keras.Model) -> list[Array]:
    """Return the states of a model's metrics, for `merge_captured`."""
    return [variable.numpy() for variable in model.metrics_variables]


def merge_captured(model: keras.Model, parts: Sequence[Sequence[Array]]) -> None:
    """Merge the metric states of several copies into a model, as its variables declare it.

    Parameters
    ----------
    model : keras.Model
        Its metrics are built.
    parts : sequence
        `capture_metrics` results, in the order of the rows.
    """
    for variable, *given in zip(model.metrics_variables, *parts, strict=True):
        values = [np.asarray(value, np.float64) for value in given]
        if variable.aggregation in ("sum", "mean"):
            parts_of_mean = len(parts) if variable.aggregation == "mean" else 1
            variable.assign(np.add.reduce(values) / parts_of_mean)
        else:
            variable.assign(values[0])


def check_metrics(model: keras.Model, x: Any, y: Any, outputs: Any, weights: Any = None) -> None:
    """Check that metric states of ranks or partitions can be summed. Runs on the driver.

    Each metric that is not Keras's own measures two parts of a batch in sequence, as in one
    process. Its state is compared to the sum of its states of both parts, as on two ranks. The
    outputs are random, since a model's real outputs can all be zero.

    Parameters
    ----------
    model : keras.Model
        Compiled; its metrics are reset.
    x, y, outputs, weights : arrays or structures of arrays
        A batch, rows first; weights may be None.

    Raises
    ------
    ParamError
        If the states of a metric differ.
    """
    half = len(keras.tree.flatten(outputs)[0]) // 2
    rng = np.random.default_rng(0)
    varied = keras.tree.map_structure(
        lambda output: keras.ops.cast(rng.uniform(0.1, 0.9, output.shape), output.dtype), outputs
    )
    parts = [
        keras.tree.map_structure(
            lambda array, cut=cut: None if array is None else array[cut], (x, y, varied, weights)
        )
        for cut in (slice(half), slice(half, 2 * half))
    ]
    try:
        # This call builds the metrics.
        _measure(model, [(x, y, outputs, weights)])
        if not half or all(map(is_known, leaf_metrics(model))):
            return
        joint, first, second = (_measure(model, some) for some in (parts, parts[:1], parts[1:]))
    except Exception as error:
        logger.warning(
            "metrics: whether the ranks' metrics can be added up is not known, since they cannot "
            "be called on the driver (%s: %s).",
            type(error).__name__,
            error,
        )
        return
    finally:
        model.reset_metrics()
    for metric, *states in zip(leaf_metrics(model), joint, first, second, strict=True):
        for expected, *own in zip(*states, strict=True):
            merged = np.add(*own)
            if is_known(metric) or np.allclose(expected, merged, 1e-3, 1e-6, equal_nan=True):
                continue
            raise ParamError(
                f"metrics: the state of {metric.name!r} ({type(metric).__name__}) cannot be added "
                f"up over ranks or partitions: two batches after each other give {expected}, and "
                f"the sum of their states is {merged}. Keep sums and counts, or make its variables "
                "with add_variable(aggregation='mean') (their mean) or 'only_first_replica' (the "
                "first one's). evaluate(df.coalesce(1)) has one partition."
            )


def is_known(metric: Any) -> bool:
    """Return whether a metric defines how its state is reduced, or is one of Keras's."""
    return is_keras(type(metric)) or any(
        variable.aggregation != "sum" for variable in metric.variables
    )


def has_own_update(metric: Any) -> bool:
    """Return whether the user's code compares labels and outputs; Keras's metrics align them."""
    function = getattr(metric, "_fn", keras.Model)
    return not (is_keras(type(metric).update_state) and is_keras(function))


def _measure(model: keras.Model, parts: Sequence[Any]) -> list[list[Array]]:
    """Return the state of each metric after some batches."""
    with traceless():
        model.reset_metrics()
        for x, y, outputs, weights in parts:
            model.compute_metrics(x, y, outputs, weights)
    return [[v.numpy() for v in metric.variables] for metric in leaf_metrics(model)]
