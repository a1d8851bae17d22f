"""The params of a training: the model, what it is trained with, and for how long.

Runs on the driver.
"""

from __future__ import annotations

from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import (
    DeclaredParams,
    boolean,
    declare,
    integer,
    number,
    numbers,
    objects,
)
from hvd_estimators.training.buffer_reduction import parse_buffer_reduction

__all__ = ["TrainingParams"]


def _compressor(name: str, value: Any) -> Any:
    if not all(callable(getattr(value, part, None)) for part in ("compress", "decompress")):
        raise ParamError(
            f"{name}: expected a compressor of Horovod's, found {value!r}. Set one such as "
            "horovod.torch.Compression.fp16."
        )
    return value


class TrainingParams(DeclaredParams):
    """What is trained, with what, and for how long."""

    model = declare("The model to train. Required.")
    optimizer = declare("The optimizer. Its learning rate is for one rank.")
    learning_rate = declare(
        "Learning rate of one rank, instead of the optimizer's (in all its groups of "
        "parameters). A LightningModule has to have it as learning_rate or lr, itself or in its "
        "hparams, as Lightning's own tuner wants it.",
        convert=number(0),
    )
    scale_learning_rate = declare(
        "Multiply the learning rate by the number of ranks for training.",
        default=True,
        convert=boolean,
    )
    loss = declare("A loss function, or a list with one per label.")
    loss_weights = declare("Weight of each label's loss. Default: 1 / labels.", convert=numbers)
    metrics = declare("Metrics to measure in training and validation.", default=[])
    callbacks = declare(
        "Objects whose methods are called on every rank, with keyword arguments: "
        "on_train_begin(module, optimizer), on_epoch_begin(epoch), on_epoch_end(epoch, logs), "
        "on_train_end(), as far as they have them. What state_dict() returns, tensors and plain "
        "values, is kept with the run; load_state_dict(state) gets it after on_train_begin() where "
        "a run goes on (within an epoch after on_epoch_begin(), which is called again). Of a "
        "callback without state_dict(), what it holds in its attributes and has these two methods "
        "is kept: schedulers, for example.",
        default=[],
        convert=objects,
    )
    buffer_reduction = declare(
        "Buffer to how it is reduced over the ranks at the end of each epoch and before a "
        "validation: 'mean', 'max', 'min', 'sum' (of what each rank has added) or 'rank0'. For "
        "buffers that the model computes from its batches; {'running_max': 'max'} is each buffer "
        "of this name. In Keras the name is that of a variable that is not trained. Default: "
        "statistics of batch normalization are averaged; other buffers are rank 0's in torch and "
        "Lightning, and averaged in Keras.",
        default={},
        convert=parse_buffer_reduction,
    )
    gradient_compression = declare("Horovod compressor of gradients.", convert=_compressor)
    batch_size = declare("Rows of a batch, on each rank.", default=32, convert=integer(1))
    val_batch_size = declare(
        "Rows of a validation batch, on each rank. Default: batch_size.", convert=integer(1)
    )
    epochs = declare("Epochs of the whole run.", default=1, convert=integer(1))
    resume_stopped = declare(
        "Whether to go on with a run that a callback has stopped early, as far as epochs says. "
        "Otherwise its model is returned as it is. Leave out or change what has stopped it.",
        default=False,
        convert=boolean,
    )
    train_steps_per_epoch = declare(
        "Batches of an epoch on each rank. Default: as many as hold every row once.",
        convert=integer(1),
    )
    validation_steps_per_epoch = declare(
        "Validation batches of an epoch on each rank. Default: as many as hold every row once.",
        convert=integer(1),
    )
    backward_passes_per_step = declare(
        "Batches whose gradients are averaged before one step of the optimizer.",
        default=1,
        convert=integer(1),
    )
    terminate_on_nan = declare(
        "Whether to look after each optimizer step if a loss or a parameter is NaN or infinite, "
        "and to fail then, on all ranks, with a NotFiniteError that names step and parameter. The "
        "checkpoints are of steps before.",
        default=False,
        convert=boolean,
    )
    random_seed = declare(
        "Seed of the validation split, the rows' order and the framework.", convert=integer(0)
    )
    dry_run = declare(
        "Whether the driver tries model and loss on a few rows before training, on copies, so that "
        "shapes that do not fit end fit() early. What cannot run there is left to the ranks.",
        default=True,
        convert=boolean,
    )

    def _check_loss_weights(self, labels: int) -> None:
        """Make sure that weights of the losses are as many as the labels."""
        weights = self.getOrDefault("loss_weights")
        if isinstance(weights, list) and len(weights) != labels:
            raise ParamError(
                f"loss_weights: expected one per label, {labels}, found {len(weights)}."
            )
