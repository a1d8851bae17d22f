"""Cells of the matrix of exactness, and their reference: plain torch in one process.

A cell trains one network with a kind of loss in a situation of the ranks. All frameworks start with
the same weights, train on the same rows, and must end as the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parquet_files import write_columns
from reference import global_batches
from torch.nn import functional

EPOCHS, MOMENTUM, CLIP = 2, 0.9, 0.3
WIDTH, HIDDEN, OUT = 4, 6, 9
LENGTH, CLASSES = 3, 3
"""The outputs of a row are scores of 9 classes, or of 3 classes for each of 3 tokens."""
PADDING = 0
"""The class of tokens that do not count."""
CLASS_WEIGHTS = {0: 4.0, 2: 0.25, 5: 2.0, 8: 0.5}
WEIGHT = torch.tensor([CLASS_WEIGHTS.get(number, 1.0) for number in range(OUT)])


@dataclass(frozen=True)
class Situation:
    """Rows and ranks of a fit.

    Attributes
    ----------
    rows : int
        Rows in the store.
    batch_size : int
        Rows in a batch of a shard.
    shards : int
        Ranks that the run began with; two ranks train.
    passes : int
        Batches of each shard in a step.
    """

    rows: int = 37
    batch_size: int = 4
    shards: int = 2
    passes: int = 1

    def steps(self) -> list[np.ndarray]:
        """Return the rows of each step of an epoch."""
        batches = global_batches(self.rows, self.shards, self.batch_size)
        parts = range(0, len(batches), self.passes)
        return [np.concatenate(batches[first : first + self.passes]) for first in parts]


SITUATIONS = {
    # The shards have 18 and 19 rows: five batches, the last ones of 2 and 3 rows.
    "2 ranks": Situation(),
    # The last step of an epoch has one batch of each rank.
    "accumulation": Situation(passes=2),
    # Rank 0 trains on two shards, and rank 1 on one.
    "fewer ranks": Situation(shards=3),
    # Rank 0 has no row in the last step.
    "empty batch": Situation(rows=7, batch_size=1),
}


def _mean(out: torch.Tensor, batch: Any) -> Any:
    return functional.mse_loss(out, batch["value"]), None


def _sum(out: torch.Tensor, batch: Any) -> Any:
    return functional.cross_entropy(out, batch["target"], reduction="sum"), None


def _class_weights(out: torch.Tensor, batch: Any) -> Any:
    losses = functional.cross_entropy(out, batch["target"], reduction="none")
    return (losses * WEIGHT[batch["target"]] * batch["weight"]).mean(), None


def _weighted_mean(out: torch.Tensor, batch: Any) -> Any:
    loss = functional.cross_entropy(out, batch["target"], WEIGHT)
    return loss, WEIGHT[batch["target"]].sum()


def _masked(out: torch.Tensor, batch: Any) -> Any:
    scores, tokens = out.reshape(-1, LENGTH, CLASSES).transpose(1, 2), batch["tokens"]
    loss = functional.cross_entropy(scores, tokens, ignore_index=PADDING)
    return loss, (tokens != PADDING).sum()


def masked_words(out: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of words that are padded to the longest row, and its weight."""
    scores = out.reshape(-1, LENGTH, CLASSES)[:, : words.shape[1]].transpose(1, 2)
    return functional.cross_entropy(scores, words, ignore_index=PADDING), (words != PADDING).sum()


def _counted(out: torch.Tensor, batch: Any) -> Any:
    positive = batch["value"] > 0
    errors = (out - batch["value"]).square() * positive
    return errors.sum() / positive.sum(), positive.sum()


def _sample_weights(out: torch.Tensor, batch: Any) -> Any:
    errors = (out - batch["value"]).square().mean(dim=1)
    return (errors * batch["weight"]).mean(), None


def _joint(out: torch.Tensor, batch: Any) -> Any:
    """Compare some outputs with the input, and keep the others small."""
    error = (out[:, :WIDTH] - batch["features"]).square().sum(dim=1)
    return error.mean() + 0.1 * out[:, WIDTH:].square().sum(dim=1).mean(), None


def _joint_sum(out: torch.Tensor, batch: Any) -> Any:
    return len(out) * _joint(out, batch)[0], None


@dataclass(frozen=True)
class Kind:
    """Kind of loss.

    Attributes
    ----------
    loss : callable
        Returns the loss of outputs and a batch, and its weight if the weight is not the rows.
    label : str or None
        The label column.
    rate : float
        The learning rate.
    own_step : bool
        Whether the user's function makes the step, and clips the gradients.
    """

    loss: Callable[[torch.Tensor, Any], Any]
    label: str | None = "value"
    rate: float = 0.1
    own_step: bool = False

    @property
    def labels(self) -> list[str]:
        return [] if self.label is None else [self.label]

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtypes of labels that are classes."""
        return {name: "int64" for name in self.labels if name != "value"}


KINDS = {
    "mean": Kind(_mean),
    "sum": Kind(_sum, "target", rate=0.01),
    "class and sample weights": Kind(_class_weights, "target"),
    "weighted mean": Kind(_weighted_mean, "target"),
    "masked": Kind(_masked, "tokens"),
    "masked, of a collate_fn": Kind(_masked, "words"),
    "masked, of padding": Kind(_masked, None),
    "counted": Kind(_counted),
    "sample weights": Kind(_sample_weights),
    "joint": Kind(_joint, None),
    "joint sum": Kind(_joint_sum, None, rate=0.002),
    "own step": Kind(_mean, own_step=True),
    "own step with a weighted mean": Kind(_weighted_mean, "target", own_step=True),
}


def cells(kinds: Iterable[str], absent: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return the pairs of a kind of loss and a situation that a framework has.

    Parameters
    ----------
    kinds : iterable of str
        The kinds that the framework has.
    absent : iterable of str
        Situations that are errors with steps of the user.
    """
    return [
        (kind, situation)
        for kind in kinds
        for situation in SITUATIONS
        if not (KINDS[kind].own_step and situation in absent)
    ]


def columns_of(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    lengths = rng.integers(1, LENGTH + 1, rows)
    # The first shards have few tokens that count, and other classes than the last ones.
    lengths[: rows // 2] = 1
    target = rng.integers(0, OUT, rows)
    target[: rows // 3] %= 3
    counts = np.arange(LENGTH) < lengths[:, None]
    return {
        "features": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        "value": (rng.normal(size=(rows, OUT)) + np.linspace(-1, 1, rows)[:, None]).astype("f4"),
        "target": target,
        "tokens": np.where(counts, rng.integers(1, CLASSES, (rows, LENGTH)), PADDING),
        "weight": rng.uniform(0.1, 3.0, rows).astype(np.float32),
    }


def write_all(folder: Path) -> dict[int, str]:
    """Write the rows of all situations; return the paths by number of rows."""
    paths = {}
    for rows in {situation.rows for situation in SITUATIONS.values()}:
        paths[rows] = str(folder / f"{rows}-rows")
        for index, part in enumerate(np.array_split(np.arange(rows), 2)):
            columns = {name: array[part] for name, array in columns_of(rows).items()}
            columns["words"] = np.empty(len(part), object)
            for row, tokens in enumerate(columns["tokens"]):
                columns["words"][row] = tokens[tokens != PADDING]
            name = f"part-{index}.parquet"
            write_columns(paths[rows], columns, row_group_size=9, name=name)
    return paths


def start_weights() -> list[np.ndarray]:
    """Return kernels, of inputs by outputs, and biases."""
    rng = np.random.default_rng(1)
    shapes = [(WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, OUT), (OUT,)]
    return [rng.normal(scale=0.5, size=shape).astype(np.float32) for shape in shapes]


def make_net() -> torch.nn.Sequential:
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, OUT)
    )
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), start_weights(), strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    return net


def weights_of(net: torch.nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().T for parameter in net.parameters()]


def make_optimizer(net: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTUM)


@functools.cache
def train_alone(kind: str, situation: str) -> list[np.ndarray]:
    """Train in one process over the rows of each step."""
    given = KINDS[kind]
    columns = {n: torch.from_numpy(c) for n, c in columns_of(SITUATIONS[situation].rows).items()}
    net = make_net()
    optimizer = make_optimizer(net, given.rate)
    for rows in SITUATIONS[situation].steps() * EPOCHS:
        batch = {name: column[rows] for name, column in columns.items()}
        optimizer.zero_grad()
        given.loss(net(batch["features"]), batch)[0].backward()
        if given.own_step:
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
    return weights_of(net)


def settings(backend: Any, store: Any, kind: str, situation: str, collectives: str) -> Any:
    """Return the params of all frameworks."""
    given = SITUATIONS[situation]
    return {
        "backend": backend,
        "store": store,
        "feature_cols": ["features"],
        "label_cols": KINDS[kind].labels,
        "batch_size": given.batch_size,
        "backward_passes_per_step": given.passes,
        "epochs": EPOCHS,
        "collectives": collectives,
        "shuffle": False,
        "scale_learning_rate": False,
        "verbose": 0,
    }


def assert_as_alone(weights: list[np.ndarray], results: Any, kind: str, situation: str) -> None:
    """Compare the weights of all ranks with one process, which ends with others than the first."""
    assert len({result.weights_digest for result in results}) == 1
    expected = train_alone(kind, situation)
    moved = [np.abs(a - b).max() for a, b in zip(expected, start_weights(), strict=True)]
    assert min(moved) > 0.01, moved
    for found, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
