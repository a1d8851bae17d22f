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
from hvd_estimators.keras.backend import (
    has_own_step,
    has_own_test_step,
    is_keras,
)

logger = logging.getLogger(__name__)


def leaf_metrics(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """Yield a model's metrics, including each metric that was passed to ``compile()``."""
    for metric in model.metrics:
        # Keras wraps the metrics of compile() in a single metric.
        yield from getattr(metric, "metrics", None) or [metric]


def metrics_with_merge_state(model: keras.Model) -> list[Any]:
    """Return the metrics that define ``merge_state`` to merge their states."""
    return [metric for metric in leaf_metrics(model) if callable(_merge_state(metric))]


def summed_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of the metrics without ``merge_state``, which are summed."""
    merged = {id(v) for metric in metrics_with_merge_state(model) for v in metric.variables}
    return [variable for variable in model.metrics_variables if id(variable) not in merged]


def merge_states(metric: Any, states: Sequence[Sequence[Array]]) -> None:
    """Merge the states of several metrics into one metric of the same kind.

    Parameters
    ----------
    metric : keras.metrics.Metric
        Has a method ``merge_state(metrics)``.
    states : sequence of sequence of array
        For each metric, the values of its variables.
    """
    for variable, value in zip(metric.variables, states[0], strict=True):
        variable.assign(value)
    metric.merge_state([_twin(metric, state) for state in states[1:]])


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


MetricStates = tuple[list[Array], list[list[Array]]]
"""States of the metrics that are summed, and of each one that merges its own."""


def capture_metrics(model: keras.Model) -> MetricStates:
    """Return the states of a model's metrics, for `merge_captured`."""
    return (
        [variable.numpy() for variable in summed_variables(model)],
        [[v.numpy() for v in metric.variables] for metric in metrics_with_merge_state(model)],
    )


def merge_captured(model: keras.Model, parts: Sequence[MetricStates]) -> None:
    """Merge the metric states of several copies into a model.

    Parameters
    ----------
    model : keras.Model
        Its metrics are built.
    parts : sequence
        `capture_metrics` results, in the order of the rows.
    """
    for position, variable in enumerate(summed_variables(model)):
        values = [np.asarray(summed[position], np.float64) for summed, _ in parts]
        if variable.aggregation in ("sum", "mean"):
            parts_of_mean = len(parts) if variable.aggregation == "mean" else 1
            variable.assign(np.add.reduce(values) / parts_of_mean)
        else:
            variable.assign(values[0])
    for position, metric in enumerate(metrics_with_merge_state(model)):
        merge_states(metric, [merged[position] for _, merged in parts])


def check_metrics(model: keras.Model, x: Any, y: Any, outputs: Any, weights: Any = None) -> None:
    """Check that the ranks' metric states can be summed. Runs on the driver.

    Each metric that is not Keras's own first measures two parts of a batch in sequence, as in one
    process. This result is compared to the result of the summed states of the two parts, as on two
    ranks. The outputs are random, since a model's real outputs can all be zero.

    Parameters
    ----------
    model : keras.Model
        Compiled; its metrics are reset.
    x, y, outputs, weights : arrays or structures of arrays
        A batch, rows first; weights may be None.

    Raises
    ------
    ParamError
        If the results of a metric differ.
    """
    half = len(keras.tree.flatten(outputs)[0]) // 2
    rng = np.random.default_rng(0)
    varied = keras.tree.map_structure(
        lambda output: keras.ops.cast(rng.uniform(0.1, 0.9, output.shape), output.dtype),
        outputs,
    )
    parts = [
        keras.tree.map_structure(
            lambda array, cut=cut: None if array is None else array[cut],
            (x, y, varied, weights),
        )
        for cut in (slice(half), slice(half, 2 * half))
    ]
    try:
        # This call builds the metrics.
        _measure(model, [(x, y, outputs, weights)])
        if not half or all(map(_is_known, leaf_metrics(model))):
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
        if _is_known(metric):
            continue
        expected = _result(metric, states[0])
        merged = _result(metric, [a + b for a, b in zip(*states[1:], strict=True)])
        metric.reset_state()
        if not np.allclose(expected, merged, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ParamError(
                f"metrics: the state of {metric.name!r} ({type(metric).__name__}) cannot be added "
                f"up over ranks: two batches after each other measure {expected}, and the sum of "
                f"their states {merged}. Give the class a method merge_state(self, metrics) that "
                "takes in the variables of other metrics of its kind, or make its variables with "
                "add_variable(aggregation='mean') (the mean of the ranks') or 'only_first_replica' "
                "(rank 0's)."
            )


def _is_known(metric: Any) -> bool:
    """Return whether a metric defines how its state is reduced, or is one of Keras's."""
    return (
        is_keras(type(metric))
        or callable(_merge_state(metric))
        or any(variable.aggregation != "sum" for variable in metric.variables)
    )


def _merge_state(metric: Any) -> Any:
    return getattr(metric, "merge_state", None)


def _measure(model: keras.Model, parts: Sequence[Any]) -> list[list[Array]]:
    """Return the state of each metric after some batches."""
    with traceless():
        model.reset_metrics()
        for x, y, outputs, weights in parts:
            model.compute_metrics(x, y, outputs, weights)
    return [[v.numpy() for v in metric.variables] for metric in leaf_metrics(model)]


def _result(metric: Any, state: Sequence[Array]) -> list[float]:
    for variable, value in zip(metric.variables, state, strict=True):
        variable.assign(value)
    with traceless():
        result = metric.result()
    return [
        number
        for value in keras.tree.flatten(result)
        for number in np.ravel(np.asarray(value, np.float64)).tolist()
    ]


def _twin(metric: Any, state: Sequence[Array]) -> Any:
    """Return a metric of the same kind with another state."""
    twin = object.__new__(type(metric))
    own = {
        id(variable): keras.Variable(value, dtype=variable.dtype, trainable=False)
        for variable, value in zip(metric.variables, state, strict=True)
    }

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(entry) for entry in value]
        return own.get(id(value), value)

    # Bypass Keras's attribute tracking.
    vars(twin).update({name: replaced(value) for name, value in vars(metric).items()})
    return twin
