"""Arguments of ``compile``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.custom_objects import Recipe
from hvd_estimators.keras.model_file import variable_value
from hvd_estimators.keras.outputs import Outputs, by_output


@dataclass(frozen=True)
class CompileSettings:
    """Arguments of `keras.Model.compile`.

    Attributes
    ----------
    optimizer : Recipe or None
        The optimizer; None for a model with its own ``compile``, which is not compiled again.
    state : list of array
        Values of the optimizer's variables; empty before its first step.
    compiled : mapping
        The model's other compile arguments, in Keras's own order of outputs.
    given : mapping
        Params that replace them: ``loss``, ``loss_weights`` and ``metrics``, if set. They follow
        the order of the labels, or are given by name.
    label_cols : sequence of str
        The label columns.
    learning_rate : float or None
        Replaces the optimizer's learning rate, unless None.
    """

    optimizer: Recipe | None
    state: Sequence[Array]
    compiled: Mapping[str, Any]
    given: Mapping[str, Any]
    label_cols: Sequence[str]
    learning_rate: float | None = None

    @property
    def loss(self) -> Any:
        """The loss, or a structure of several losses; None if the model has no loss."""
        return self.given.get("loss", self.compiled.get("loss"))

    @property
    def compares(self) -> bool:
        """True if a loss or metrics compare labels to outputs."""
        names = ("metrics", "weighted_metrics")
        given = self.given if "loss" in self.given else {**self.compiled, **self.given}
        return self.loss is not None or any(given.get(name) for name in names)

    def apply(self, model: keras.Model, outputs: Outputs | None) -> None:
        """Compile a model.

        Parameters
        ----------
        model : keras.Model
            The model. If it is built, the optimizer's state is restored as well.
        outputs : Outputs or None
            The model's outputs. None if labels do not pair with outputs, which requires the user's
            own train step.

        Raises
        ------
        ParamError
            If a name matches neither a label nor an output.
        """
        if self.optimizer is None:
            return
        settings = dict(self.compiled)
        if "loss" in self.given:
            settings.update(loss_weights=None, metrics=None, weighted_metrics=None)
        settings.update(self.given if outputs is None else self._by_output(outputs))
        model.compile(**settings, optimizer=self.optimizer.make())
        if model.built and self.state:
            model.optimizer.build(model.trainable_variables)
            if len(self.state) == len(model.optimizer.variables):
                for variable, value in zip(model.optimizer.variables, self.state, strict=True):
                    variable.assign(value)
        if self.learning_rate is not None:
            model.optimizer.learning_rate = self.learning_rate

    def _by_output(self, outputs: Outputs) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        labels, single = self.label_cols, len(self.label_cols) == 1
        given = self.given
        if "loss" in given:
            settings["loss"] = by_output("loss", given["loss"], outputs, labels)
            if not losses(settings["loss"]):
                raise ParamError(f"loss: no label has one, found {given['loss']!r}.")
        elif self.loss is not None and ("loss_weights" in given or outputs.auxiliary):
            settings["loss"] = self._compiled_loss(outputs)
        if "loss_weights" in given:
            # Keras requires a number for every output, even for one without a loss.
            settings["loss_weights"] = by_output(
                "loss_weights", given["loss_weights"], outputs, labels, missing=1.0
            )
        if "metrics" in given:
            settings["metrics"] = by_output(
                "metrics", given["metrics"], outputs, labels, list_is_value=single
            )
        return {name: outputs.pack(values) for name, values in settings.items()}

    def _compiled_loss(self, outputs: Outputs) -> list[Any]:
        loss = self.loss
        if isinstance(loss, (list, tuple)) and len(loss) == len(outputs.labels):
            flat = list(loss)
        else:
            flat = by_output("loss", loss, outputs, self.label_cols)
        for name, label, value in zip(outputs.names, outputs.labels, flat, strict=True):
            if label is None and value is not None:
                raise ParamError(
                    f"the model is compiled with a loss for its output {name!r}, which "
                    "has no label column. Set label_cols to all outputs that have a loss, or "
                    "compile the model without a loss for this output.",
                    param="label_cols",
                )
        return flat


def losses(loss: Any) -> list[Any]:
    """Return all losses in the ``loss`` argument of `compile`."""
    return [entry for entry in keras.tree.flatten(loss) if entry is not None]


def sums(loss: Any) -> list[Any]:
    """Return those in the ``loss`` argument that have ``reduction="sum"``."""
    return [entry for entry in losses(loss) if getattr(entry, "reduction", None) == "sum"]


def optimizer_state(optimizer: keras.optimizers.Optimizer) -> list[Array]:
    """Return copies of the values of an optimizer's variables; none before its first step."""
    if not (optimizer.built and int(optimizer.iterations)):
        return []
    return [np.array(variable_value(variable)) for variable in optimizer.variables]
