"""`TorchEstimator`, which trains a torch module on a DataFrame."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.params import (
    boolean,
    column_names,
    functions,
    narrowed,
    number,
    objects,
    one_of,
    param,
    shapes,
    string,
)
from hvd_estimators.torch.framework import TorchFramework
from hvd_estimators.torch.model import TorchModel
from hvd_estimators.torch.objective import LOSS_FORMS
from hvd_estimators.torch.optimizer_step import INTERVALS, PRECISIONS
from hvd_estimators.torch.serialization import load_module, load_trained
from hvd_estimators.torch.sharding import MODES
from hvd_estimators.torch.shared_params import TorchSharedParams
from hvd_estimators.torch.stateful import has_state
from hvd_estimators.torch.stored_weights import find_weights_in
from hvd_estimators.torch.tensors import INPUT_FORMS
from hvd_estimators.torch.trainer import TrainedObjects

if TYPE_CHECKING:
    from hvd_estimators.torch.signatures import TorchEstimatorSignatures
else:
    TorchEstimatorSignatures = HorovodEstimator

logger = logging.getLogger(__name__)


def _function(
    name: str, value: Callable[[torch.optim.Optimizer], Any]
) -> Callable[[torch.optim.Optimizer], Any]:
    if not callable(value):
        raise ParamError(
            f"{name}: expected a function of the optimizer, such as lambda optimizer: "
            f"StepLR(optimizer, 10), found {value!r}."
        )
    return value


def _stateful(name: str, value: Iterable[Any]) -> list[Any]:
    converted = objects(name, value)
    for entry in converted:
        if not has_state(entry):
            raise ParamError(
                f"{name}: expected objects with state_dict() and load_state_dict(), found "
                f"{entry!r}."
            )
        if isinstance(entry, torch.amp.GradScaler) and not entry.is_enabled():
            logger.warning(
                "%s: the GradScaler is disabled, also on the ranks. It was made with enabled=False "
                "or, for 'cuda', without a GPU. GradScaler('cpu') scales on GPUs, too.",
                name,
            )
    return converted


class TorchEstimator(TorchSharedParams, TorchEstimatorSignatures):
    """Estimator that trains a torch module on a DataFrame, data-parallel, one process per rank.

    ``fit(df)`` writes the needed columns to the store as Parquet, trains on ``num_proc`` Spark
    tasks, and returns a `TorchModel`.

    The model is called with one tensor per feature column, rows first. A column with one number per
    row gives shape ``(rows,)``. ``input_form`` can pass the tensors by name. The model returns one
    tensor, or one tensor per label. A list or tuple pairs outputs with labels by position; a dict
    or dataclass pairs them by label name. A label is reshaped to its output's shape if both have
    the same number of elements.

    The given module and optimizer are not modified. The ranks compile a ``torch.compile`` module
    again, and `TorchModel.transform` runs the module uncompiled. Runs on the driver.

    An epoch trains on every row once. Set the learning rate that you would use in a single process:
    training multiplies it by the number of ranks, and the returned optimizer has the original rate.
    Each step uses the gradient of the mean loss over the global batch. With ``sample_weight_col``
    this loss is ``sum(weight * loss) / rows``, in training and in validation. Metrics are not
    weighted.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError
        Before training, if params, columns, shapes, rows, store or cluster are not usable.
    WorkerFailedError
        If a rank fails.
    """

    framework_class = TorchFramework

    model = narrowed(HorovodEstimator, "model", "torch.nn.Module | Callable[..., torch.nn.Module]")
    optimizer = narrowed(
        HorovodEstimator,
        "optimizer",
        "torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]",
    )
    loss = narrowed(HorovodEstimator, "loss", "Callable[..., Any] | Sequence[Callable[..., Any]]")

    input_shapes = param(
        "Shape of each input: the shape of one row, or of a batch with -1 as its first "
        "dimension. Default: the columns' shapes.",
        convert=shapes,
    )
    input_form = param(
        "Form of the model's inputs: 'positional' (one tensor per feature column), 'keyword' "
        "(tensors by column name), or 'dict' (one dict of column name to tensor).",
        default="positional",
        convert=one_of(*INPUT_FORMS),
    )
    loss_form = param(
        "Form of the loss: 'per_label' (loss(output, label), one loss per output and label) or "
        "'joint' (one loss for all). A joint loss takes any of the keywords outputs (the "
        "model's result), labels and inputs (lists of tensors) and sample_weights. It returns "
        "the mean over the rows. label_cols=[] requires 'joint'.",
        default="per_label",
        convert=one_of(*LOSS_FORMS),
    )
    loss_constructors = param(
        "A callable, or one per label, that creates the loss on the rank; replaces loss. It "
        "takes any of the keywords model, optimizer, device, rank, size and spec.",
        convert=functions,
    )
    train_minibatch_fn = param(
        "Function that replaces forward pass, backward pass and step. It takes (model, "
        "optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights, "
        "backward_passes_per_step, batch_idx), or the first of these, and returns (outputs, "
        "loss). When the last backward() before a step returns, gradients are the mean over the "
        "ranks, so you can clip them. Step if (batch_idx + 1) % backward_passes_per_step == 0; "
        "the last batch of an epoch has such a number. List objects whose state it uses, such as "
        "a GradScaler, in stateful.",
        type="Callable[..., Any]",
    )
    stateful = param(
        "Objects with state_dict() and load_state_dict(), such as schedulers, gradient scalers, "
        "averaged weights and further optimizers, that train_minibatch_fn, losses or callbacks "
        "use. Gradients of these optimizers are averaged. Checkpoints "
        "contain their state. On the ranks, the estimator's functions and objects share them, "
        "together with the trained model and optimizer.",
        convert=_stateful,
    )
    batch_size_fn = param(
        "Function that returns the size of a row (a dict, as collate_fn gets), such as lambda row: "
        "len(row['tokens']). A batch larger than max_batch_size is computed in parts of rows of "
        "similar size, whose gradients add up: the step is the same, and needs less memory. "
        "Needs collate_fn or padding.",
        type="Callable[[dict[str, Any]], float]",
    )
    max_batch_size = param(
        "Largest size of a part: its number of rows times the batch_size_fn of its largest row, "
        "as after padding. A larger row is a part by itself.",
        convert=number(0),
    )

    gradient_clip_norm = param(
        "Maximum norm of the averaged gradient of all parameters; larger gradients are scaled.",
        convert=number(0),
    )
    gradient_clip_value = param(
        "Maximum absolute value of each element of the averaged gradient.", convert=number(0)
    )
    lr_scheduler = param(
        "Function that takes the optimizer and returns a scheduler, such as lambda optimizer: "
        "StepLR(optimizer, 10). Checkpoints contain the scheduler's state. ReduceLROnPlateau gets "
        "the validation loss, or the training loss without validation.",
        convert=_function,
    )
    lr_scheduler_interval = param(
        "When the scheduler steps: after each 'epoch' or after each optimizer 'step'.",
        default="epoch",
        convert=one_of(*INTERVALS),
    )
    sharding = param(
        "Whether each rank holds a part of every parameter, gradient and optimizer state: 'none', "
        "'full', or 'optimizer', which keeps a layer's parameters from its forward to its backward "
        "pass and is faster than 'full'. The ranks use torch's fully_shard.",
        default="none",
        convert=one_of(*MODES),
    )
    shard_modules = param(
        "Names of the classes of layers that sharding gathers one after another, such as "
        "['BertLayer']. Default: the entries of the model's ModuleLists.",
        convert=column_names,
    )
    activation_checkpointing = param(
        "Whether the layers of shard_modules compute their activations again in the backward pass, "
        "instead of keeping them. Needs sharding.",
        default=False,
        convert=boolean,
    )
    cpu_offload = param(
        "Whether parameters, gradients and optimizer states stay in the memory of the machine, and "
        "a layer's parameters are copied to the GPU while it computes. Optimizers step on the CPU, "
        "so this is slower. Needs sharding.",
        default=False,
        convert=boolean,
    )
    init_weights = param(
        "Path or URL of a safetensors file, or of a folder of them, with the weights with which "
        "training begins. model must be a function, such as one that calls from_config() of "
        "Hugging Face. The driver makes the module without these weights, and each rank reads "
        "them. What the files lack keeps the function's values.",
        convert=string,
    )
    only_trainable = param(
        "Whether checkpoints, the fitted model and its saved form hold only the parameters that "
        "require gradients when model, a function, returns the module, and the buffers. The "
        "frozen ones are read from init_weights wherever the model is loaded. Needs init_weights.",
        default=False,
        convert=boolean,
    )
    precision = param(
        "Precision of forward pass and loss in training: '32', 'bf16' or 'fp16' (with a gradient "
        "scaler), by torch.autocast. Parameters are 32-bit floats, and transform() uses these.",
        default="32",
        convert=one_of(*PRECISIONS),
    )

    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> TorchModel:
        module, optimizer, returned = self._trained(run_results)
        find_weights_in(module, run_results.spec.store)
        model = self.get_model_class()(
            **self._get_model_kwargs(
                model=module.eval(),
                history=[epoch.as_dict() for epoch in run_results.history],
                optimizer=optimizer,
                run_id=run_id,
                metadata=metadata,
            )
        )
        model.setParams(**returned)
        return model

    def _trained(self, run_results: RunResults) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
        """Return the trained module, its optimizer, and params that may refer to the module."""
        given: Callable[[], TrainedObjects] = functools.cache(
            lambda: load_module(run_results.spec.objects)
        )
        module, others = load_trained(run_results.state, lambda: given().module)
        return module, *(others or (given().optimizer, given().returned))

    def get_model_class(self) -> type[TorchModel]:
        """Return the class of the model that `fit` returns. Subclasses can override this method."""
        return TorchModel

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        names = (
            *("input_shapes", "column_dtypes", "input_form"),
            *("loss_form", "loss", "loss_constructors", "loss_weights", "metrics"),
            *("label_shapes", "precision"),
        )
        own = {name: self.getOrDefault(name) for name in names}
        own["_upstream_names"] = self.upstream_names
        return {**own, **super()._get_model_kwargs(**fitted)}
