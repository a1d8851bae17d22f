"""A ``train_minibatch_fn`` that accumulates gradients trains on two ranks as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from rank_pool import shared_ranks
from reference import OPTIMIZERS, WIDTH, assert_same_weights, global_batches, make_net, write_rows
from torch.nn import functional

from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

EPOCHS, BATCH = 2, 5

ROWS = 30
"""Rows of three batches of two ranks, so that an epoch's last step has one batch."""


def test_an_own_gradient_scaler_steps_after_the_last_batches_of_an_epoch(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    net = make_net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def step(*given: Any) -> Any:
        model, optimizer, arrange, loss_fn, inputs, labels, _, passes, batch_idx = given
        if batch_idx % passes == 0:
            optimizer.zero_grad()
        outputs, arranged = arrange(model(*inputs), labels)
        loss = loss_fn(outputs, arranged)
        scaler.scale(loss / passes).backward()
        if (batch_idx + 1) % passes == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return outputs, loss

    model, _ = reference.fit(
        store,
        2,
        "sgd",
        model=net,
        optimizer=optimizer,
        backend=shared_ranks(2),
        train_minibatch_fn=step,
        stateful=[scaler],
        batch_size=BATCH,
        epochs=EPOCHS,
        backward_passes_per_step=2,
    )
    batches = global_batches(ROWS, 2, BATCH)
    assert len(batches) == 3
    # Only the function steps: the estimator cannot know what its gradients are multiplied by.
    expected = reference.train_alone(
        columns, batches, OPTIMIZERS["sgd"], EPOCHS, passes=2, clip=0.5
    )
    assert_same_weights(model.getModel(), expected)


class Scores(torch.nn.Module):
    """Scores of four classes from a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scores = torch.nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> Any:
        scores: torch.Tensor = self.scores(x)
        return scores


def classes_of(label: torch.Tensor) -> torch.Tensor:
    return label.long() % 4


def low(scores: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over the rows of half the classes, and their number."""
    chosen = classes_of(label) < 2
    losses = functional.cross_entropy(scores, classes_of(label), reduction="none")
    return (losses * chosen).sum() / chosen.sum().clamp(min=1), chosen.sum()


def by_weight(scores: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mean over absolute labels, and their sum."""
    weight = label.abs()
    return (scores.pow(2).mean(dim=1) * weight).sum() / weight.sum(), weight.sum()


def regular(scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return a mean over rows."""
    return (scores.logsumexp(dim=1) - label).pow(2).mean()


def several_losses(
    model: Any, optimizer: Any, _: Any, loss_fn: Any, inputs: Any, labels: Any, *given: Any
) -> Any:
    (_, passes, batch_idx), label = given, labels[0]
    for loss in (low, by_weight, regular):
        found = loss(model(*inputs), label)
        scaled = loss_fn.scale(*found) if isinstance(found, tuple) else loss_fn.scale(found)
        (scaled / passes).backward()
    if (batch_idx + 1) % passes == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model(*inputs), found


def test_losses_with_weights_of_their_own_train_as_in_one_process(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    net, expected = Scores(), Scores()
    model = TorchEstimator(
        **{"backend": shared_ranks(2), "store": store, "model": net, "verbose": 0},
        **{"feature_cols": ["features"], "label_cols": ["label"], "collectives": "torch"},
        **{"shuffle": False, "scale_learning_rate": False, "random_seed": 3},
        **{"batch_size": BATCH, "epochs": EPOCHS},
        optimizer=OPTIMIZERS["momentum"](net.parameters()),
        loss=torch.nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0)),
        train_minibatch_fn=several_losses,
        stateful=[],
    ).fit_on_parquet()

    optimizer = OPTIMIZERS["momentum"](expected.parameters())
    for rows in global_batches(ROWS, 2, BATCH) * EPOCHS:
        x, label = (torch.from_numpy(columns[name][rows]) for name in ("features", "label"))
        scores = expected(x)
        optimizer.zero_grad()
        (low(scores, label)[0] + by_weight(scores, label)[0] + regular(scores, label)).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
    assert_same_weights(model.getModel(), expected)
