"""Runs interrupted within an epoch resume only with the same order of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hvd_estimators.data.manifest import RowRange
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.fingerprint import as_json, reading_identity
from hvd_estimators.fitting.run import Run
from hvd_estimators.loading.plan import ShardPlan
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.loading.spec import DataSpec, ReaderOptions
from hvd_estimators.store import LocalStore, RunPaths
from hvd_estimators.store.paths import Position


class Own(DataModule):
    """Estimator with a custom read order."""


def data(folder: str = "file:/a", stop: int = 5, **changed: Any) -> DataSpec:
    shards = [(RowRange(f"{folder}/1", 0, 0, 8), RowRange(f"{folder}/2", 0, 0, stop))]
    spec = DataSpec(
        *((), folder, None, ShardPlan(tuple(shards)), None, 1, ("x",), ("y",), None, 4, 4, 4, 0),
        *(7, None, ReaderOptions(shuffle=True)),
    )
    options = {name: changed.pop(name) for name in list(changed) if name in vars(spec.options)}
    return replace(spec, options=replace(spec.options, **options), **changed)


def interrupted(position: Position, **fit: Any) -> Run:
    store = LocalStore("/unused", save_runs=False)
    run = Run(store, RunPaths("mine", "runs/mine", "runs/mine/checkpoints", None))
    run.checkpoints = (Position(0, 4), position)
    run.metadata = {"fits": [{}, fit]}
    return run


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (data(stop=6), "row groups of the files"),
        (data(shuffle_buffer_size=2**20), r"shuffle_buffer_size null \(now 1048576\)"),
        (data(inmemory_cache_all=True), "inmemory_cache_all"),
        (data(row_order="2"), "order of the rows in the files"),
        (data(data_module=Own), r"data_module null \(now .*Own\)"),
    ],
)
def test_another_order_within_an_epoch_is_rejected(other: DataSpec, told: str) -> None:
    reading = as_json(reading_identity(data()))
    with pytest.raises(ParamError, match=told) as caught:
        interrupted(Position(2, 16), reading=reading).check_reading(other)
    assert "within epoch 3" in str(caught.value)
    assert "runs/mine/checkpoints/checkpoint-000002-16.ckpt" in str(caught.value)
    # From the start of an epoch, rows may come in any order.
    interrupted(Position(3), reading=reading).check_reading(other)


def test_a_run_without_its_record_resumes_only_between_epochs() -> None:
    run = interrupted(Position(2, 16))
    run.metadata = None
    with pytest.raises(ParamError, match=r"'runs/mine/metadata.json', which is missing.*delete"):
        run.check_reading(data())
    run.checkpoints = (Position(3),)
    run.check_reading(data())


def test_other_files_with_the_same_rows_keep_the_order() -> None:
    reading = as_json(reading_identity(data()))
    for same in (data(), data("s3://b"), data(data_module="arrow"), data(local_cache_size=3)):
        interrupted(Position(2, 16), reading=reading).check_reading(same)
    assert data(shuffle=False, shuffle_buffer_size=3) != data(shuffle=False)
    assert reading_identity(data(shuffle=False, shuffle_buffer_size=3)) == reading_identity(
        data(shuffle=False)
    )
