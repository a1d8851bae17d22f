"""Matrix of exactness: ranks of torch and Lightning end with the weights of one process."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import exactness
import numpy as np
import pytest
import torch
from exactness import (
    CLASS_WEIGHTS,
    CLASSES,
    CLIP,
    KINDS,
    LENGTH,
    PADDING,
    SITUATIONS,
    WEIGHT,
    assert_as_alone,
    cells,
    make_net,
    make_optimizer,
    masked_words,
    weights_of,
)
from fewer_ranks import ThreeShards
from pytorch_lightning import LightningModule
from rank_pool import StandingBackend, shared_ranks
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from hvd_estimators import Store
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

COLLECTIVES = ("torch", "horovod")
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def ranks() -> StandingBackend:
    for module in (exactness, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    return shared_ranks(2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return exactness.write_all(tmp_path_factory.mktemp("rows"))


class TorchOfThreeShards(ThreeShards, TorchEstimator):
    """Run started with 3 ranks."""


class LightningOfThreeShards(ThreeShards, LightningEstimator):
    """Run started with 3 ranks."""


class Net(torch.nn.Module):
    """The network, whose outputs a kind of loss takes in its form."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.of_tokens = make_net(), kind.startswith("masked")

    def forward(self, x: torch.Tensor, *of_words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.of_tokens:  # CrossEntropyLoss takes the classes as second dimension.
            length = of_words[-1].shape[1] if of_words else LENGTH
            out = out.reshape(-1, LENGTH, CLASSES)[:, :length].transpose(1, 2)
        return out


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    words = pad_sequence([torch.from_numpy(row["words"]) for row in rows], True, PADDING)
    features = torch.from_numpy(np.stack([row["features"] for row in rows]))
    return {"is_word": words != PADDING, "words": words, "features": features}


def of_padded(outputs: torch.Tensor, inputs: Any) -> Any:
    _, words, mask = inputs
    assert torch.equal(mask, words != PADDING)
    loss = functional.cross_entropy(outputs, words, ignore_index=PADDING)
    return {"loss": loss, "denominator": mask.sum()}


OF_WORDS: dict[str, dict[str, Any]] = {
    "masked, of a collate_fn": {"collate_fn": collate},
    "masked, of padding": {
        "padding": {"words": PADDING},
        "masks": True,
        "feature_cols": ["features", "words"],
    },
}


def counted(output: torch.Tensor, label: torch.Tensor) -> dict[str, Any]:
    loss, weight = KINDS["counted"].loss(output, {"value": label})
    return {"loss": loss, "denominator": weight}


class Joint(torch.nn.Module):
    """Loss of outputs and inputs that says how it reduces the rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.reduction = kind, "sum" if kind == "joint sum" else "mean"

    def forward(self, outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = KINDS[self.kind].loss(outputs, {"features": inputs[0]})[0]
        return loss


def own_step(
    model: Any, optimizer: Any, arrange: Any, loss_fn: Any, inputs: Any, labels: Any, *given: Any
) -> Any:
    """Accumulate, clip and step, as in a loop by hand."""
    _, passes, batch_idx = given
    outputs, arranged = arrange(model(*inputs), labels)
    loss = loss_fn(outputs, arranged)
    (loss / passes).backward()
    if (batch_idx + 1) % passes == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return outputs, loss


IN_TORCH: dict[str, dict[str, Any]] = {
    "mean": {"loss": functional.mse_loss},
    "sum": {"loss": torch.nn.CrossEntropyLoss(reduction="sum")},
    "class and sample weights": {
        "loss": functional.cross_entropy,
        "class_weight": CLASS_WEIGHTS,
        "sample_weight_col": "weight",
    },
    "weighted mean": {"loss": torch.nn.CrossEntropyLoss(WEIGHT)},
    "masked": {"loss": torch.nn.CrossEntropyLoss(ignore_index=PADDING)},
    "masked, of a collate_fn": {
        "loss": torch.nn.CrossEntropyLoss(ignore_index=PADDING),
        **OF_WORDS["masked, of a collate_fn"],
    },
    "masked, of padding": {
        "loss": of_padded,
        "loss_form": "joint",
        "outputs": [0],
        **OF_WORDS["masked, of padding"],
        "column_dtypes": {"words": "int64"},
    },
    "counted": {"loss": counted},
    "sample weights": {"loss": functional.mse_loss, "sample_weight_col": "weight"},
    "joint": {"loss": Joint("joint"), "loss_form": "joint", "outputs": [0]},
    "joint sum": {"loss": Joint("joint sum"), "loss_form": "joint", "outputs": [0]},
    "own step": {"loss": functional.mse_loss, "train_minibatch_fn": own_step},
    "own step with a weighted mean": {
        "loss": torch.nn.CrossEntropyLoss(WEIGHT),
        "train_minibatch_fn": own_step,
    },
}


def check_torch(
    backend: Any,
    store: Store,
    paths: dict[int, str],
    cell: tuple[str, str],
    collectives: str = "torch",
    net: torch.nn.Module | None = None,
    **params: Any,
) -> None:
    """Fit a cell of the matrix, and compare the weights with one process."""
    kind, situation = cell
    net = net or Net(kind)
    estimator = TorchOfThreeShards if SITUATIONS[situation].shards == 3 else TorchEstimator
    given = {
        **exactness.settings(backend, store, kind, situation, collectives),
        "column_dtypes": KINDS[kind].dtypes,
        **IN_TORCH[kind],
        **params,
    }
    model = estimator(
        **given, model=net, optimizer=make_optimizer(net, KINDS[kind].rate)
    ).fit_on_parquet(paths[SITUATIONS[situation].rows])
    assert_as_alone(weights_of(model.getModel()), backend.results, kind, situation)


@pytest.mark.parametrize("collectives", COLLECTIVES)
@pytest.mark.parametrize(
    ("kind", "situation"), cells(IN_TORCH, absent=["fewer ranks", "empty batch"])
)
def test_torch(
    ranks: Any, paths: Any, store: Store, kind: str, situation: str, collectives: str
) -> None:
    check_torch(ranks, store, paths, (kind, situation), collectives)


LIMIT = 4


class NarrowNet(Net):
    """The network, which takes at most `LIMIT` words at a time while it trains."""

    def forward(self, x: torch.Tensor, *of_words: torch.Tensor) -> torch.Tensor:
        rows, length = of_words[-1].shape
        if torch.distributed.is_initialized() and rows > 1:
            assert rows * length <= LIMIT
        return super().forward(x, *of_words)


@pytest.mark.parametrize(
    ("situation", "collectives"),
    [*((name, "torch") for name in SITUATIONS), ("2 ranks", "horovod")],
)
@pytest.mark.parametrize("kind", OF_WORDS)
def test_parts_of_batches(
    ranks: Any, paths: Any, store: Store, kind: str, situation: str, collectives: str
) -> None:
    check_torch(
        *(ranks, store, paths, (kind, situation), collectives, NarrowNet(kind)),
        batch_size_fn=lambda row: len(row["words"]),
        max_batch_size=LIMIT,
        reader_pool_type="process" if collectives == "horovod" else "thread",
        dry_run=False,
    )


def stacked(rows: list[dict[str, Any]]) -> Any:
    columns = {name: np.stack([row[name] for row in rows]) for name in ("features", "value")}
    return {name: torch.from_numpy(column) for name, column in columns.items()}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", ["mean", "sample weights", "counted"])
def test_parts_with_losses_of_rows(
    ranks: Any, paths: Any, store: Store, kind: str, situation: str
) -> None:
    check_torch(
        *(ranks, store, paths, (kind, situation)),
        collate_fn=stacked,
        batch_size_fn=lambda row: 1 + (row["features"] > 0).sum(),
        max_batch_size=LIMIT,
    )


SHARDED = cells(kind for kind in IN_TORCH if not KINDS[kind].own_step)


@pytest.mark.parametrize(
    ("kind", "situation"),
    [
        # With fewer ranks, a rank has passes without rows.
        cell if "mean" in cell or "fewer ranks" in cell else pytest.param(*cell, marks=SOAK)
        for cell in SHARDED
    ],
)
def test_sharded(ranks: Any, paths: Any, store: Store, kind: str, situation: str) -> None:
    check_torch(
        *(ranks, store, paths, (kind, situation), "auto"), sharding="full", shard_modules=["Linear"]
    )


class Module(LightningModule):
    """Module whose training step returns a loss, or a loss and its weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = make_net(), kind
        self.automatic_optimization = not KINDS[kind].own_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch["features"])
        if self.kind in OF_WORDS:
            loss, weight = masked_words(out, batch["words"])
        else:
            loss, weight = KINDS[self.kind].loss(out, batch)
        found = loss if weight is None else {"loss": loss, "denominator": weight}
        if self.automatic_optimization:
            return found
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(found)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.net, KINDS[self.kind].rate)


# All losses with a weight take the same way: the training step returns both.
IN_LIGHTNING = ["mean", "weighted mean", "sample weights", "joint", *OF_WORDS]
IN_LIGHTNING += ["own step", "own step with a weighted mean"]


@pytest.mark.parametrize("collectives", COLLECTIVES)
@pytest.mark.parametrize(
    ("kind", "situation"),
    # A module needs a row on each rank in each step, which test_lightning_programs.py checks.
    [
        (kind, situation)
        for kind, situation in cells(IN_LIGHTNING, absent=["fewer ranks", "accumulation"])
        if situation != "empty batch"
    ],
)
def test_lightning(
    ranks: Any, paths: Any, store: Store, kind: str, situation: str, collectives: str
) -> None:
    estimator = LightningOfThreeShards if SITUATIONS[situation].shards == 3 else LightningEstimator
    given = exactness.settings(ranks, store, kind, situation, collectives)
    model = estimator(
        **{**given, **OF_WORDS.get(kind, {})},
        column_dtypes=KINDS[kind].dtypes,
        model=Module(kind),
        sample_weight_col="weight" if kind == "sample weights" else None,
        logger=False,
    ).fit_on_parquet(paths[SITUATIONS[situation].rows])
    assert_as_alone(weights_of(model.getModel().net), ranks.results, kind, situation)
