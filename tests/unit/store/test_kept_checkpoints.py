"""Retention of a run's checkpoints and selection of the best."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import Any

import pytest
from saved_checkpoints import epochs_in, file_names, model_of, restored, save, state_of

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.checkpoints import best_checkpoint, list_checkpoints, positions
from hvd_estimators.store.paths import manifest_of
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.spec import CheckpointOptions, EpochMetrics


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_and_the_best_are_kept(any_store: Any, keep: int) -> None:
    run = any_store.run_paths("mine")
    losses = [0.5, math.nan, 0.2, 0.2, 0.9, 0.8, 0.7]
    saved: list[int] = []
    # In two parts.
    for part in ([1, 2, 3, 4], [5, 6, 7]):
        with CheckpointWriter(any_store, run, CheckpointOptions("torch", keep)) as writer:
            for epoch in part:
                writer.save(state_of(epoch, loss=losses[epoch - 1]), model_of(epoch))
                writer.finish()
                saved.append(epoch)
                best = min(saved, key=lambda e: (losses[e - 1] != losses[e - 1], losses[e - 1], e))
                assert epochs_in(any_store) == sorted({best, *saved[-keep:]})
    found = best_checkpoint(list_checkpoints(any_store, run))
    assert found is not None
    assert (found.epoch, found.monitor, found.mode) == (3, "loss", "min")


def test_metrics_may_be_nan_or_infinite(store: Any) -> None:
    run = store.run_paths("mine")
    with CheckpointWriter(store, run, CheckpointOptions("torch")) as writer:
        for epoch, loss in enumerate([math.inf, math.nan, -math.inf], 1):
            writer.save(state_of(epoch, loss=loss), model_of(epoch))
    found = [info.metrics["loss"] for info in list_checkpoints(store, run)]
    assert math.isnan(found[0])
    assert found[1] == -math.inf
    pointer = Path(manifest_of(store.get_checkpoints("mine")[-1])).read_text()
    # Strict JSON, for other readers.
    json.loads(pointer, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"monitor": "val_accuracy"}, 2),
        ({"monitor": "val_accuracy", "mode": "min"}, 1),
        ({"monitor": "odd", "mode": "max"}, 1),
        # Without the prefix: no training metric has the name.
        ({"monitor": "accuracy"}, 2),
        ({}, 3),
    ],
)
def test_options_select_the_best_checkpoint(store: Any, options: Any, best: int) -> None:
    accuracies, odd, losses = [0.1, 0.9, 0.5, 0.4], [9, 8, 7, 6], [0.4, 0.3, 0.1, 0.2]
    history: tuple[EpochMetrics, ...] = ()
    run = store.run_paths("mine")
    with CheckpointWriter(store, run, CheckpointOptions("torch", 1, **options)) as writer:
        for epoch in range(4):
            train = {"loss": 1.0 / (epoch + 1), "groups": [{"odd": odd[epoch]}]}
            validation = {"loss": losses[epoch], "val_accuracy": accuracies[epoch]}
            history = (*history, EpochMetrics(epoch, train, validation))
            writer.save(RunState(epoch + 1, 0, 2, history), model_of(epoch))
    assert epochs_in(store) == sorted({best, 4})


@pytest.mark.parametrize("monitor", [None, "val_loss", "accuracy"])
def test_epochs_without_validation_do_not_take_part(store: Any, monitor: str | None) -> None:
    history: tuple[EpochMetrics, ...] = ()
    run, options = store.run_paths("mine"), CheckpointOptions("torch", 1, monitor=monitor)
    with CheckpointWriter(store, run, options, validates=True) as writer:
        for epoch in range(5):
            # The training loss is lowest in the last epoch.
            validation = {"loss": float(epoch), "accuracy": 1.0 / epoch} if epoch % 2 else None
            history = (*history, EpochMetrics(epoch, {"loss": -epoch}, validation))
            writer.save(RunState(epoch + 1, 0, 2, history), model_of(epoch))
    assert epochs_in(store) == [2, 5]
    with (
        pytest.raises(ParamError, match="checkpoint_monitor: found 'other', which is not measured"),
        CheckpointWriter(store, run, CheckpointOptions("torch", 1, monitor="other")) as writer,
    ):
        writer.save(RunState(5, 0, 2, history), model_of(4))


def test_mid_epoch_checkpoints_sort_between_epochs(any_store: Any) -> None:
    run = any_store.run_paths("mine")
    with CheckpointWriter(any_store, run, CheckpointOptions("torch", 3)) as writer:
        for epoch, rows in [(1, 0), (1, 48), (1, 144)]:
            writer.save(state_of(epoch, rows), model_of(epoch))
    assert [(i.epoch, i.rows) for i in list_checkpoints(any_store, run)] == [
        *((1, 0), (1, 48), (1, 144))
    ]
    infos = list_checkpoints(any_store, run)
    assert any_store.get_checkpoints("mine") == [info.path for info in infos]
    assert [bool(info.metrics) for info in infos] == [True, False, False]
    assert best_checkpoint(infos) == infos[0]
    save(any_store, 2)
    # A mid-epoch checkpoint is never the best.
    assert [*positions(any_store, run)] == [(1, 144), (2, 0)]


def test_a_deletion_that_failed_is_tried_again(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = store.run_paths("mine")
    with CheckpointWriter(store, run, CheckpointOptions("torch", 1)) as writer:
        writer.save(state_of(1), model_of(1))
        writer.save(state_of(2), model_of(2))
        with monkeypatch.context() as patch:
            patch.setattr(type(store), "delete", lambda *_: (_ for _ in ()).throw(OSError("no")))
            writer.save(state_of(3), model_of(3))
            writer.finish()
        assert "could not be deleted: no" in caplog.text
        assert (2, 0) in positions(store, run)
        writer.save(state_of(4), model_of(4))
        writer.finish()
        assert {*positions(store, run)}.isdisjoint({(2, 0), (3, 0)})


def test_only_leftovers_of_killed_ranks_are_deleted(store: Any) -> None:
    folder = Path(store.get_checkpoint_path("mine"))
    save(store, 1)
    others = ["best.ckpt", "kept.keras", "checkpoint-epoch=1.ckpt", ".checkpoint-000001.ckpt"]
    left = ["checkpoint-000007.ckpt", f".checkpoint-000002.ckpt-{uuid.uuid4().hex}"]
    for name in [*others, *left]:
        (folder / name).write_bytes(b"")
    save(store, 2)
    names = {*others, *(f"checkpoint-00000{n}.{s}" for n in (1, 2) for s in ("ckpt", "json"))}
    assert set(file_names(store)) == names


def test_a_checkpoint_is_saved_where_a_killed_rank_left_its_file(store: Any) -> None:
    save(store, 1)
    orphan = Path(store.get_checkpoints("mine")[0].replace("000001", "000002"))
    orphan.write_bytes(b"half")
    save(store, 2, options=CheckpointOptions("torch", keep=1))
    assert restored(store) == (2, 2)
    assert orphan.stat().st_size > 4
