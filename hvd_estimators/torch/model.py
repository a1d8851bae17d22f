"""`TorchModel`, which predicts with a trained torch module."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.batch import DEFAULT_RESOURCES, Predictor, Resources
from hvd_estimators.inference.broadcast import Payload
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import boolean, narrowed, numbers, one_of, param, shapes
from hvd_estimators.torch.dry_run import output_shapes
from hvd_estimators.torch.evaluation import LOSS_ARGUMENTS, TorchEvaluator, combine
from hvd_estimators.torch.objective import LOSS_FORMS
from hvd_estimators.torch.objective_args import objective_of
from hvd_estimators.torch.optimizer_step import PRECISIONS
from hvd_estimators.torch.predictor import TorchPredictor, transform_spec
from hvd_estimators.torch.serialization import copied, module_payload, plain_module, save_state
from hvd_estimators.torch.shared_params import TorchSharedParams
from hvd_estimators.torch.stored_weights import (
    load_weights,
    set_stored_weights,
    stored_weights,
    weights_place,
)
from hvd_estimators.torch.tensors import INPUT_FORMS, TensorSpec

if TYPE_CHECKING:
    from hvd_estimators.torch.signatures import TorchModelSignatures
else:
    TorchModelSignatures = HorovodModel


class TorchModel(TorchSharedParams, TorchModelSignatures):
    """Fitted torch module as a Spark ML Transformer.

    `transform` adds one column per output. A number per row becomes a double, a one-dimensional
    output becomes an ML vector, and more dimensions become nested arrays of doubles. `transform`
    runs on the driver and is lazy. The forward passes run in Arrow batches on the executors, on the
    task's cores or on the GPU that Spark assigns to the task.

    `transform` expects columns as returned by the training's ``transformation_fn``. With
    ``apply_transformation``, the columns are transformed first, as in training.
    """

    model = narrowed(HorovodModel, "model", "torch.nn.Module")
    optimizer = param(
        "The optimizer after training, with the learning rate of one rank.",
        type="torch.optim.Optimizer",
    )
    loss = param("The loss of the training.")
    loss_constructors = param("The loss constructors of the training.")
    loss_form = param(
        "Form of the loss in training: one per label ('per_label') or one for all ('joint').",
        default="per_label",
        convert=one_of(*LOSS_FORMS),
    )
    loss_weights = param("Weight of each label's loss in training.", convert=numbers)
    metrics = param("The metrics of the training, for evaluate().")
    label_shapes = param(
        "Shape of each label: the shape of one row, or of a batch with -1 as its first dimension.",
        convert=shapes,
    )
    precision = param(
        "Precision of training and of evaluate(): '32', 'bf16' or 'fp16'.",
        default="32",
        convert=one_of(*PRECISIONS),
    )
    _upstream_names = param(
        "Whether metrics have the names of horovod.spark.", default=False, convert=boolean
    )
    input_shapes = param(
        "Shape of each input: the shape of one row, or of a batch with -1 as its first dimension.",
        convert=shapes,
    )
    input_form = param(
        "Form of the model's inputs: 'positional', 'keyword' or 'dict'.",
        default="positional",
        convert=one_of(*INPUT_FORMS),
    )

    def getModel(self) -> torch.nn.Module:
        """Return the trained module.

        The weights of a model that was trained with ``sharding`` are files in the store, or beside
        the saved model. This method reads them, and keeps them in memory. With
        ``only_trainable``, it returns a copy with the base at each call.
        """
        module: Any = self.getOrDefault("model")
        weights = stored_weights(module)
        if weights is None:
            return module
        if weights.is_base:
            module = copied(module)
            set_stored_weights(module, weights)
        return load_weights(module)

    def _plain_model(self) -> torch.nn.Module:
        """Return the module, not compiled."""
        module = self.getOrDefault("model")
        if module is None:
            raise ParamError("model is not set. Set model.")
        return plain_module(module)

    def _transform_spec(self) -> TensorSpec:
        return transform_spec(self.getOrDefault)

    def _make_predictor(self) -> tuple[bytes | LocalFile, Any]:
        spec, precision = self._transform_spec(), self.getOrDefault("inference_precision")
        module = self._plain_model()

        weights_in = weights_place(module)

        def load(document: Payload, resources: Resources = DEFAULT_RESOURCES) -> Predictor:
            return TorchPredictor(document, spec, precision, resources, weights_in)

        return module_payload(module), load

    def _make_evaluator(self) -> tuple[bytes | LocalFile, Any, Any]:
        module, precision = self._plain_model(), self.getOrDefault("precision")
        objective = objective_of(self.getOrDefault, self._transform_spec())
        objective.check_arguments(LOSS_ARGUMENTS)
        weights_in = weights_place(module)

        def load(payload: Payload, resources: Resources = DEFAULT_RESOURCES) -> TorchEvaluator:
            return TorchEvaluator(payload, precision, resources, weights_in)

        return module_payload(module, objective), load, functools.partial(combine, objective)

    def _input_dtype(self, module: torch.nn.Module, name: str) -> torch.dtype:
        """Return a column's dtype in the module's input. Overridable."""
        return self._transform_spec().dtype(name)

    def _output_shapes(self) -> list[tuple[int, ...]]:
        shapes = self.getOrDefault("output_shapes")
        if shapes is not None:
            return [tuple(shape) for shape in shapes]
        given = self.getOrDefault("input_shapes")
        if given is None:
            raise ParamError(
                "output_shapes is not known for a model that was not fitted. Set output_shapes "
                "(the shape of one row of each output), or input_shapes."
            )
        if any(-1 in shape[1:] for shape in given):
            raise ParamError(
                f"output_shapes is not known for inputs of any size, input_shapes={given}. Set "
                "output_shapes (the shape of one row of each output)."
            )
        module, names = self.getOrDefault("model"), self._input_columns().names
        inputs = self._zeros(module, names, given)
        return output_shapes(module, self._transform_spec(), inputs)

    def _zeros(
        self,
        module: torch.nn.Module,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> list[torch.Tensor]:
        """Return two rows of zeros for each input."""
        if len(shapes) != len(names):
            raise ParamError(
                f"input_shapes: expected a shape for each of {', '.join(names)}, found {shapes!r}. "
                "Set the shape of each input, with -1 first."
            )
        return [
            torch.zeros(2, *shape[1:], dtype=self._input_dtype(module, name), device=device)
            for name, shape in zip(names, shapes, strict=True)
        ]

    def _known_sizes(self) -> dict[str, int | None]:
        sizes = super()._known_sizes()
        given = self.getOrDefault("input_shapes")
        if given is None or self.getOrDefault("apply_transformation"):
            return sizes
        rows = (shape[1:] for shape in given)
        shaped = zip(self._input_columns().names, rows, strict=False)
        # A dimension of -1 may have any size.
        return {**{name: math.prod(row) for name, row in shaped if -1 not in row}, **sizes}

    def _extra_files(self) -> dict[str, LocalFile]:
        """Return the weights as a plain ``torch.save`` file, for use without this package."""
        module = plain_module(self.getOrDefault("model"))
        if stored_weights(module) is not None:
            return {}  # its weights are files that other programs read
        weights = LocalFile()
        with open(weights.path, "wb") as file:
            save_state(module.state_dict(), file)
        return {"weights.pt": weights}
