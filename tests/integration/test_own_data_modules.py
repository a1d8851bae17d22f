"""Fits with a user's data module match one process, also when they resume within an epoch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras_reference
import lightning_reference
import numpy as np
import pytest
import reference
import resuming
import torch
from rank_pool import shared_ranks
from reference import OPTIMIZERS, WIDTH, train_alone, write_rows
from resuming import kept_checkpoints

from hvd_estimators.loading.readers import DataModule

pytestmark = pytest.mark.integration

ROWS, BATCH_SIZE, EPOCHS = 64, 8, 3


def setup_module() -> None:
    import cloudpickle

    for module in (keras_reference, resuming, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)


def make_columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"features": features, "label": (features @ np.arange(1, WIDTH + 1)).astype(np.float32)}


def order_of(number: int) -> np.ndarray:
    return np.random.default_rng([5, number]).permutation(ROWS)


class Users(DataModule):
    """Rows in another order in each pass, which the module numbers from 0."""

    def passes(self) -> Iterator[int]:
        return itertools.count()

    def train_data(self) -> Iterator[dict[str, np.ndarray]]:
        columns = make_columns()
        for number in self.passes():
            own = order_of(number)[self.cur_shard :: self.shard_count]
            for rows in own.reshape(-1, self.train_batch_size):
                yield {name: values[rows] for name, values in columns.items()}

    def val_data(self) -> Iterator[dict[str, np.ndarray]]:
        return iter(())


class Skipping(Users):
    """Module that does not make the batches that a resumed run has taken."""

    skips_train_steps = True

    def passes(self) -> Iterator[int]:
        return itertools.count(self.skip_train_steps // self.steps_per_epoch_train)

    def train_data(self) -> Iterator[dict[str, np.ndarray]]:
        left = self.skip_train_steps % self.steps_per_epoch_train
        return itertools.islice(super().train_data(), left, None)


def fit(framework: str, store: Any, data_module: Any, run_id: str, **params: Any) -> list[Any]:
    """Run a fit on two ranks, and return the weights."""
    params |= {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "checkpoint_every_n_steps": 3}
    params |= {"data_module": data_module, "run_id": run_id}
    if framework == "keras":
        optimizer = keras_reference.OPTIMIZERS["momentum"]()
        estimator = keras_reference.pooled_estimator(store, 2, optimizer=optimizer, **params)
        return [np.array(v) for v in estimator.fit_on_parquet().getModel().get_weights()]
    backend = shared_ranks(2)
    if framework == "lightning":
        module = lightning_reference.Regression("momentum")
        model = lightning_reference.fit(backend, store, model=module, **params)
    else:
        model, _ = reference.fit(store, 2, "momentum", backend=backend, **params)
    return [parameter.detach().numpy() for parameter in model.getModel().parameters()]


def fit_alone(framework: str) -> list[np.ndarray]:
    batches = [
        np.concatenate([order_of(number)[rank::2][step * 8 : step * 8 + 8] for rank in range(2)])
        for number in range(EPOCHS)
        for step in range(ROWS // 2 // BATCH_SIZE)
    ]
    if framework == "keras":
        optimizer = keras_reference.OPTIMIZERS["momentum"]()
        return keras_reference.train_alone(make_columns(), batches, optimizer, 1).get_weights()
    net: torch.nn.Module = train_alone(make_columns(), batches, OPTIMIZERS["momentum"], 1)
    return [parameter.detach().numpy() for parameter in net.parameters()]


@pytest.mark.parametrize("data_module", [Users, Skipping])
@pytest.mark.parametrize("framework", ["torch", "keras", "lightning"])
def test_a_run_resumes_at_its_position(framework: str, data_module: Any, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    whole = fit(framework, store, data_module, "kept", keep_checkpoints=99)
    for found, expected in zip(whole, fit_alone(framework), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    positions = []
    for run_id, position in kept_checkpoints(store, "kept"):
        positions.append(position)
        for found, expected in zip(fit(framework, store, data_module, run_id), whole, strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=str(position))
    # Four steps an epoch, each of 16 rows.
    assert positions == [(0, 48), (1, 0), (1, 32), (2, 0), (2, 16), (3, 0)]
