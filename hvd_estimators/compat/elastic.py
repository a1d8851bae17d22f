"""State of a Keras 3 model for ``horovod.elastic``. Runs on the ranks.

Horovod's own ``KerasState`` and ``TensorFlowKerasState`` need features that Keras 3 does not have.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
from horovod.common.elastic import ObjectState

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.backend import further_optimizers
from hvd_estimators.keras.collectives import broadcast_variables


class KerasState(ObjectState):
    """Elastic state of a model, its optimizer and other values, for ``hvd.elastic.run``.

    Replaces ``hvd.elastic.KerasState`` and ``hvd.elastic.TensorFlowKerasState``, which do not work
    with Keras 3. Call ``hvd.init()`` first. Horovod's callbacks for elastic training
    (``CommitStateCallback``, ``UpdateEpochStateCallback``, ``UpdateBatchStateCallback`` of
    ``horovod.tensorflow.keras.elastic``) support this class.

    A commit holds the weights and the variables of all optimizers of the model. In relaunched
    ranks, random layers such as dropout restart their random streams.

    Parameters
    ----------
    model : keras.Model
        The model. Must be built, so that its weights exist.
    optimizer : keras.optimizers.Optimizer, optional
        Default: the optimizer that the model was compiled with.
    **values
        Other values to commit; each becomes an attribute.

    Raises
    ------
    ParamError
        If the model or an optimizer in its attributes is not built, or there is no optimizer.
    DependencyError
        If Keras does not run on TensorFlow.

    Examples
    --------
    >>> import horovod.tensorflow.keras as hvd
    >>> hvd.init()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    >>> model.compile(optimizer, "mse", jit_compile=False)
    >>> @hvd.elastic.run
    ... def train(state):
    ...     state.model.fit(
    ...         x, y, epochs=3 - state.epoch, callbacks=[
    ...             hvd.elastic.UpdateEpochStateCallback(state),
    ...             hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
    ...         ])
    >>> train(KerasState(model, epoch=0))
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, **values: Any
    ) -> None:
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if not model.built:
            raise ParamError(
                "model: expected one that is built, found one without weights. Call "
                "model.build(input_shape), or the model with a batch, first."
            )
        if optimizer is None:
            raise ParamError("optimizer: expected one, as the model was not compiled with any.")
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        others = [each for each in further_optimizers(model) if each is not optimizer]
        if not all(each.built for each in others):
            raise ParamError(
                "model: expected built optimizers in its attributes, found one without variables. "
                "Call build(variables) of each first."
            )
        self.model = model
        self.optimizer = optimizer
        self._optimizers = [optimizer, *others]
        self._save_variables()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **values)

    def save(self) -> None:
        """Save the current values."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Restore the values that were saved last."""
        for variable, value in zip(self._variables(), self._saved_variables, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's values to all ranks, and save them."""
        broadcast_variables(self._variables())
        self._save_variables()
        super().sync()

    def _variables(self) -> list[Any]:
        return [*self.model.weights, *(v for each in self._optimizers for v in each.variables)]

    def _save_variables(self) -> None:
        self._saved_variables = [np.array(variable) for variable in self._variables()]
