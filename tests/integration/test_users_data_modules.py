"""Training on a custom DataModule, with all three frameworks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import WIDTH, RecordingBackend, write_rows
from variants import others_in_soak

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.loading.readers import DataModule

pytestmark = pytest.mark.integration


class Enough(DataModule):
    """Data module with exactly enough batches for two epochs of three steps."""

    batches = 6

    def train_data(self) -> Iterator[Any]:
        rng = np.random.default_rng(self.cur_shard)
        for _ in range(self.batches):
            yield {
                "features": rng.normal(size=(8, WIDTH)).astype(np.float32),
                "label": np.ones(8, np.float32),
            }

    def val_data(self) -> Iterator[Any]:
        return iter(())


class TooFew(Enough):
    """Data module that ends in the second epoch on rank 1, and in the third on rank 0."""

    @property
    def batches(self) -> int:  # type: ignore[override]
        return 4 if self.cur_shard else 6


def fit(framework: str, store: Any, ranks: int, data_module: Any, epochs: int) -> Any:
    params = {
        "data_module": data_module,
        "epochs": epochs,
        "train_steps_per_epoch": 3,
        "batch_size": 8,
    }
    if framework == "keras":
        make = importlib.import_module("keras_reference").make_estimator
        return make(store, ranks, **params).fit_on_parquet()
    if framework == "lightning":
        fit_lightning = importlib.import_module("lightning_reference").fit
        return fit_lightning(RecordingBackend(ranks), store, **params)
    return importlib.import_module("reference").fit(store, ranks, "sgd", **params)[0]


@pytest.mark.parametrize("framework", others_in_soak("torch", "keras", "lightning"))
def test_data_modules_that_end_early_are_reported(framework: str, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 30)
    ranks = 2 if framework == "torch" else 1
    rank, epoch, batches = (1, 1, 1) if framework == "torch" else (0, 2, 0)
    message = f"Rank {rank}, epoch {epoch} .*TooFew.train_data.. ended after {batches} of 3 batches"
    with pytest.raises(WorkerFailedError, match=message):
        fit(framework, store, ranks, TooFew, 4)
    history = fit(framework, store, 1, Enough, 2).getHistory()
    losses = history["loss"] if framework == "keras" else [r["train"]["loss"] for r in history]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
