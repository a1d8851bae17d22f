"""Functions of ``horovod.tensorflow.keras`` and ``horovod.keras`` for Keras 3.

Under Keras 3, Horovod's ``DistributedOptimizer`` averages nothing and raises no error, so each rank
would train separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import keras

from hvd_estimators.exceptions import LeftOutError, ParamError
from hvd_estimators.keras import DistributedOptimizer as _DistributedOptimizer


def complete(module: ModuleType) -> None:
    """Replace a module's own functions by this module's."""
    for name in ("DistributedOptimizer", "PartialDistributedOptimizer", "load_model"):
        if hasattr(module, name):
            setattr(module, name, globals()[name])


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make an optimizer average over the ranks; see `hvd_estimators.keras.DistributedOptimizer`.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        Any optimizer.
    compression : horovod compressor, optional
        For example ``hvd.Compression.fp16``.
    backward_passes_per_step : int
        Calls whose gradients make one step.
    op, average_aggregated_gradients, process_set
        Only averages over all ranks and over the calls of a step are supported.
    name, device_dense, device_sparse, sparse_as_dense, gradient_predivide_factor, num_groups, \
    groups, scale_local_gradients
        Accepted for compatibility with Horovod; they change no result.

    Raises
    ------
    ParamError
        If anything other than averages is requested.
    """
    import horovod.tensorflow as hvd

    if op not in (None, hvd.Average):
        raise ParamError(f"op: expected Average, the only operation for Keras 3, found {op}.")
    if process_set not in (None, hvd.global_process_set):
        raise ParamError(f"process_set: expected the global process set, found {process_set}.")
    if backward_passes_per_step > 1 and not average_aggregated_gradients:
        raise ParamError(
            "average_aggregated_gradients: expected True with backward_passes_per_step above 1. "
            "This optimizer averages the gradients of a step's calls instead of adding them. Set "
            "average_aggregated_gradients=True, and multiply the learning rate by "
            "backward_passes_per_step for steps of the same size."
        )
    return _DistributedOptimizer(optimizer, compression, backward_passes_per_step)


def PartialDistributedOptimizer(*args: Any, **kwargs: Any) -> Any:
    """Raise `LeftOutError`, because partial averaging is not supported."""
    raise LeftOutError(
        "hvd_estimators has no PartialDistributedOptimizer, and Horovod's averages nothing under "
        "Keras 3. Use DistributedOptimizer, or your own training loop with hvd.allreduce."
    )


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model that resumes training with its optimizer, averaging over the ranks.

    Parameters
    ----------
    filepath : str
        See `keras.saving.load_model`.
    custom_optimizers : sequence of class, optional
        Optimizers that Keras does not know.
    custom_objects : mapping of str to object, optional
        Other objects that Keras does not know.
    compression : horovod compressor, optional
        See `DistributedOptimizer`.
    legacy_opts
        Accepted for compatibility with Horovod, and ignored.
    """
    optimizers = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, {**optimizers, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        _DistributedOptimizer(model.optimizer, compression)
    return model
