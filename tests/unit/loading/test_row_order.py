"""Resumed runs keep their shards and the seed of their row order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.backend import Backend
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.torch.framework import TorchFramework
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.spec import CheckpointOptions


class Started(Exception):
    """Raised instead of starting the ranks."""


class OneEpoch(Backend):
    """Backend whose ranks fail after an epoch."""

    def __init__(self, ranks: int, store: Any, checkpoint: bool) -> None:
        self.ranks = ranks
        self.store = store
        self.checkpoint = checkpoint

    def num_processes(self) -> int:
        return self.ranks

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.checkpoint:
            state = RunState(epoch=1, rows=0, canonical_shards=self.ranks, history=())
            run, options = self.store.run_paths("mine"), CheckpointOptions("torch")
            with CheckpointWriter(self.store, run, options) as writer:
                writer.save(state, lambda file: torch.save({}, file))
        raise Started


class TellingFramework(TorchFramework):
    """Record the data specs for the ranks."""

    def make_spec(self, common: Any, trial: Any) -> Any:
        told.append(common.data)
        return super().make_spec(common, trial)


class Telling(TorchEstimator):
    framework_class = TellingFramework


told: list[Any] = []


def start(store: Any, ranks: int, checkpoint: bool = True, **params: Any) -> Any:
    """Fit up to the start of the ranks, and return their data spec."""
    folder = Path(store.get_train_data_path())
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"x": np.arange(40, dtype=np.float32), "y": np.ones(40, np.float32)}
    parquet.write_table(pa.table(columns), folder / "a.parquet", row_group_size=2)
    net = params.get("model") or torch.nn.Linear(1, 1)
    given = {
        "backend": OneEpoch(ranks, store, checkpoint),
        "store": store,
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "input_shapes": [[1]],
        "run_id": "mine",
        "dry_run": False,
        "verbose": 0,
    }
    with pytest.raises(Started):
        Telling(**{**given, **params}).fit_on_parquet()
    return told[-1]


def test_a_resumed_run_keeps_its_shards_and_seed(store: Any) -> None:
    # Without a checkpoint, each fit starts over.
    before = start(store, 2, checkpoint=False)
    first = start(store, 3)
    assert (before.num_shards, first.num_shards, first.num_ranks) == (2, 3, 3)
    assert first.random_seed != before.random_seed
    notes = json.loads(Path(store.run_paths("mine").run_path, "metadata.json").read_text())
    assert notes["row_order"] == {
        "canonical_shards": 3,
        "random_seed": first.random_seed,
        "row_bytes": first.train_plan.row_bytes,
    }

    for ranks in (2, 1, 3):
        later = start(store, ranks)
        assert later.num_ranks == ranks
        assert later.train_plan == first.train_plan
        assert later.random_seed == first.random_seed
    with pytest.raises(ParamError, match=r"num_proc: the run 'mine' began with 3 ranks.* found 4"):
        start(store, 4)


def test_a_run_without_metadata_keeps_its_shards(store: Any) -> None:
    first = start(store, 3)
    Path(store.run_paths("mine").run_path, "metadata.json").unlink()
    resumed = start(store, 2, checkpoint=False)
    assert resumed.train_plan.num_shards == first.train_plan.num_shards == 3
    Path(store.run_paths("mine").run_path, "metadata.json").unlink()
    with pytest.raises(ParamError, match=r"num_proc: the run 'mine' began with 3 ranks.* found 4"):
        start(store, 4)


def test_rows_are_read_as_the_checkpoint_that_can_be_read_needs(store: Any) -> None:
    start(store, 2)
    with CheckpointWriter(store, store.run_paths("mine"), CheckpointOptions("torch", 9)) as writer:
        for epoch, rows in ((0, 16), (1, 0)):
            state = RunState(epoch, rows, canonical_shards=2, history=())
            writer.save(state, lambda file: torch.save({}, file))
    whole = Path(store.get_checkpoints("mine")[-1])
    # After the epoch, rows may be read in any order.
    start(store, 2, checkpoint=False, shuffle_buffer_size=2**20)
    whole.write_bytes(whole.read_bytes()[:100])
    with pytest.raises(ParamError, match=r"interrupted within epoch 1, and .*shuffle_buffer_size"):
        start(store, 2, shuffle_buffer_size=2**21)
    assert start(store, 2, checkpoint=False, shuffle_buffer_size=2**20).num_ranks == 2


class Users(DataModule):
    def train_data(self) -> Any:
        raise NotImplementedError

    val_data = train_data


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"train_minibatch_fn": lambda *_: None}, "train_minibatch_fn: the run began with 3 ranks"),
        ({"data_module": Users}, "data_module: the run 'mine' began with 3 ranks"),
        (
            {"model": torch.nn.Sequential(torch.nn.Linear(1, 2), hvd.SyncBatchNorm(2))},
            "model: .*SyncBatchNorm",
        ),
    ],
    ids=["train_minibatch_fn", "data_module", "SyncBatchNorm"],
)
def test_features_for_one_shard_per_rank_are_rejected_on_the_driver(
    store: Any, params: Any, message: str
) -> None:
    start(store, 3, **params)
    with pytest.raises(ParamError, match=f"{message}.*num_proc=3"):
        start(store, 2, **params)
    restarts = {"max_restarts": 1, "min_num_proc": 2}
    with pytest.raises(ParamError, match=r"min_num_proc: .*Leave min_num_proc out"):
        start(store, 3, **params, **restarts)
    start(store, 3, **params, **restarts | {"min_num_proc": 3})
    start(store, 3, **restarts, run_id="other")


def test_lightning_features_for_one_shard_are_rejected() -> None:
    from pytorch_lightning import LightningModule
    from test_virtual_shards import job

    from hvd_estimators.lightning.dry_run import check_shards_of_module

    as_many, fewer = job([10, 10], 4, 2), job([10, 10], 3, 2)
    automatic, manual = LightningModule(), LightningModule()
    manual.automatic_optimization = False
    normalized = torch.nn.Sequential(hvd.SyncBatchNorm(2))
    converted, converting = torch.nn.Sequential(torch.nn.BatchNorm1d(2)), {"sync_batchnorm": True}
    cases: list[tuple[str, Any]] = [
        ("manual optim", lambda data: check_shards_of_module(manual, data, {})),
        ("SyncBatchNorm", lambda data: check_shards_of_module(normalized, data, {})),
        ("SyncBatchNorm", lambda data: check_shards_of_module(converted, data, converting)),
        (
            "trainer_args: limit_val_batches",
            lambda data: check_shards_of_module(automatic, data, {"limit_val_batches": 2}),
        ),
    ]
    for message, check in cases:
        check(as_many)
        with pytest.raises(ParamError, match=f"{message}.*num_proc=4"):
            check(fewer)
        with pytest.raises(ParamError, match=f"{message}.*Leave min_num_proc out"):
            check(replace(as_many, least_ranks=3))
    check_shards_of_module(automatic, fewer, {"max_steps": 3, "limit_train_batches": 2})
    for unlimited in (1.0, 0, None):
        check_shards_of_module(automatic, fewer, {"limit_val_batches": unlimited})
    check_shards_of_module(automatic, fewer, {"fast_dev_run": False})
    check_shards_of_module(converted, fewer, {})
    check_shards_of_module(automatic, fewer, converting)
