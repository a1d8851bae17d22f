"""Rows, layouts, random numbers and rates of torch on ranks, compared with one process."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from estimators import exact_params
from rank_pool import shared_ranks
from reference import (
    OPTIMIZERS,
    assert_same_weights,
    global_batches,
    make_net,
    train_alone,
    write_rows,
)
from torch.utils.checkpoint import checkpoint

from hvd_estimators.exceptions import DataError
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration


def fit(store: Any, ranks: int, name: str, **params: Any) -> tuple[Any, Any]:
    return reference.fit(store, ranks, name, **{"backend": shared_ranks(ranks), **params})


LIBRARIES = ("horovod", "torch")


class Checkpointed(torch.nn.Sequential):
    """The reference's net; its last layers are computed again in the backward pass."""

    def forward(self, x: torch.Tensor) -> Any:
        first, *rest = self
        return checkpoint(torch.nn.Sequential(*rest), first(x), use_reentrant=False)


@pytest.mark.parametrize("library", LIBRARIES)
def test_checkpoints_train_as_one_process_when_a_rank_has_no_rows(store: Any, library: str) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 3)
    net = Checkpointed(*make_net())
    params = {"model": net, "optimizer": OPTIMIZERS["adam"](net.parameters())}
    model, _ = fit(store, 2, "adam", batch_size=1, epochs=2, collectives=library, **params)
    expected = train_alone(columns, global_batches(3, 2, 1), OPTIMIZERS["adam"], 2)
    assert_same_weights(model.getModel(), expected)


@pytest.mark.parametrize(("rows", "weighted"), [(101, False), (2, True)])
def test_validation_loss_matches_one_process(store: Any, rows: int, weighted: bool) -> None:
    write_rows(Path(store.get_train_data_path()), 64)
    # With two rows, one rank has none.
    held_out = write_rows(Path(store.get_val_data_path()), rows, seed=1)
    model, _ = fit(
        store,
        3,
        "sgd",
        batch_size=16,
        epochs=1,
        validation=0.5,
        metrics=[[torch.nn.functional.l1_loss]],
        val_batch_size=10,
        sample_weight_col="weight" if weighted else None,
    )
    with torch.no_grad():
        outputs = model.getModel()(torch.from_numpy(held_out["features"])).reshape(-1).numpy()
    errors = outputs - held_out["label"]
    measured = model.getHistory()[-1]["validation"]
    weights = held_out["weight"] if weighted else np.ones(rows)
    assert measured["loss"] == pytest.approx(float((weights * errors**2).mean()), rel=1e-5)
    assert measured["all_metrics"][0]["l1_loss"] == pytest.approx(
        float(np.abs(errors).mean()), rel=1e-5
    )


FEW = {(2, 3), (3, 2), (64, 2), (129, 3)}
"""Rows and ranks of each kind: fewer rows than ranks, whole and partial batches, uneven shards."""


class RowCounter(torch.nn.Module):
    """One embedding row per id; under SGD each row moves by its gradient."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(rows, 1)
        torch.nn.init.zeros_(self.embedding.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids.long()).reshape(-1)


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        pytest.param(rows, ranks, marks=() if (rows, ranks) in FEW else pytest.mark.soak)
        for ranks in (1, 2, 3)
        for rows in (2, 3, 63, 64, 65, 129, 1000)
    ],
)
def test_each_row_contributes_once_per_epoch(store: Any, rows: int, ranks: int) -> None:
    write_rows(Path(store.get_train_data_path()), rows, files=3)
    net = RowCounter(rows)
    batch_size, epochs, learning_rate = 16, 2, 0.5
    estimator = TorchEstimator(
        **exact_params(shared_ranks(ranks), store, feature_cols=["id"], shuffle=True),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=learning_rate),
        # The gradient of a row's output is 1 divided by the rows of its global batch.
        loss=lambda output, label: -output.mean(),
        batch_size=batch_size,
        epochs=epochs,
    )
    if rows < ranks:
        with pytest.raises(DataError, match=f"{rows} rows"):
            estimator.fit_on_parquet()
        return
    moved = estimator.fit_on_parquet().getModel().embedding.weight.detach().reshape(-1)
    moved = moved.numpy() / learning_rate
    sizes = [len(batch) for batch in global_batches(rows, ranks, batch_size)]
    # Each epoch moves each row by 1/n, where n is the size of its global batch.
    possible = {1 / a + 1 / b for a in sizes for b in sizes}
    distances = np.abs(moved[:, None] - np.array(sorted(possible))[None, :]).min(axis=1)
    assert distances.max() < 1e-5, sorted(set(moved[distances > 1e-5]))
    # All rows together move by one per step: none is missing and none counts twice.
    assert moved.sum() == pytest.approx(epochs * len(sizes), rel=1e-4)


@pytest.mark.parametrize("library", LIBRARIES)
def test_weights_depend_on_the_seed_alone(store: Any, library: str) -> None:
    write_rows(Path(store.get_train_data_path()), 500)
    params = {"shuffle": True, "epochs": 2, "collectives": library}
    states = [
        fit(store, 3, "adam", random_seed=seed, **params)[0].getModel().state_dict()
        for seed in (1, 1, 2)
    ]
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_the_learning_rate_is_scaled_and_returned_unscaled(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 128)
    model, _ = fit(store, 2, "sgd", batch_size=16, epochs=1, scale_learning_rate=True)
    expected = train_alone(
        columns,
        global_batches(128, 2, 16),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=1,
    )
    assert_same_weights(model.getModel(), expected)
    assert model.getOptimizer().param_groups[0]["lr"] == 0.05


class Drawing(torch.nn.Module):
    """Net with dropout that records the random numbers of each rank."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.net = make_net()
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            kept = self.dropout(torch.ones(64)).count_nonzero(), torch.rand(1).item()
            with (self.path / f"rank-{os.environ['HOROVOD_RANK']}").open("a") as file:
                file.write(json.dumps([*map(float, kept), np.random.rand(), random.random()]))
                file.write("\n")
        return self.net(self.dropout(x))


@pytest.mark.parametrize("seed", [3, None])
def test_random_numbers_differ_between_ranks_and_steps(
    store: Any, tmp_path: Path, seed: int | None
) -> None:
    write_rows(Path(store.get_train_data_path()), 64)
    net = Drawing(tmp_path)
    optimizer = OPTIMIZERS["adam"](net.parameters())
    settings = {"model": net, "optimizer": optimizer, "batch_size": 16, "random_seed": seed}
    fit(store, 2, "adam", epochs=2, run_id="once", **settings)
    drawn = [
        json.loads(line)
        for rank in range(2)
        for line in (tmp_path / f"rank-{rank}").read_text().splitlines()
    ]
    # Two ranks, two epochs, two steps.
    assert len(drawn) == 8
    kept, *streams = zip(*drawn, strict=True)
    assert len(set(kept)) > 1
    for numbers in streams:
        assert len(set(numbers)) == 8


class Rows(torch.nn.Module):
    """One row of weights per id, with sparse gradients; later ids also have dense gradients."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Embedding(6, 2, sparse=mixed)
        torch.nn.init.ones_(self.layer.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(ids.long(), self.layer.weight, sparse=True)
        outputs = rows.prod(dim=1) * (ids != 1)  # The row of id 1 has the gradient zero.
        if self.layer.sparse and ids.max() >= 3:
            outputs = outputs * self.layer.weight.mean()
        return outputs


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_of_any_layout_are_averaged(store: Any, library: str, mixed: bool) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 5)
    # The ranks train on ids 0 and 2, 1 and 3, none and 4.
    batches = global_batches(5, 2, 1)

    def optimizer(net: Any) -> torch.optim.Optimizer:
        if mixed:
            return torch.optim.SGD(net.parameters(), lr=0.1)
        return torch.optim.SparseAdam(list(net.parameters()), lr=0.1)

    net, expected = Rows(mixed), Rows(mixed)
    params = {"model": net, "optimizer": optimizer(net), "feature_cols": ["id"]}
    model, _ = fit(store, 2, "sgd", batch_size=1, epochs=3, collectives=library, **params)
    alone = optimizer(expected)
    for rows in batches * 3:
        ids, labels = (torch.from_numpy(columns[name][rows]) for name in ("id", "label"))
        # Each rank decides by its own row.
        errors = [(expected(i) - y) ** 2 for i, y in zip(ids.split(1), labels, strict=True)]
        alone.zero_grad()
        torch.cat(errors).mean().backward()
        alone.step()
    assert_same_weights(model.getModel(), expected)


def test_the_given_model_and_optimizer_are_unchanged(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 32)
    net = make_net()
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    fit(store, 1, "adam", model=net, optimizer=optimizer)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.01
