"""A plan's shards, run by all or by fewer ranks: the same rows in the same steps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_estimators.data.manifest import ColumnSpec, RowGroup
from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import DataModule, PlannedDataModule
from hvd_estimators.loading.spec import DataSpec, ReaderOptions, check_shards, open_data_module
from hvd_estimators.torch.loss_weights import StepBatches


class Numbers(PlannedDataModule):
    """Reader without files: a row's id is its number plus 100 times its row group's."""

    def read(self, passes: Any, workers: int) -> Any:
        for bundles in passes:
            for bundle in bundles:
                for part in bundle:
                    rows = part.row_range
                    yield {"id": 100 * rows.row_group + np.arange(rows.start, rows.stop)}


def job(groups: list[int], ranks: int, batch_size: int, **params: Any) -> DataSpec:
    """Describe training on 4 shards; the shards of validation are the same."""
    row_groups = [RowGroup("a", index, rows) for index, rows in enumerate(groups)]
    plan = plan_shards(row_groups, 4, seed=5)
    return DataSpec(
        **{
            "columns": (ColumnSpec("id", "scalar", "int64", ()),),
            "train_path": "/nowhere",
            "val_path": "/nowhere",
            "train_plan": plan,
            "val_plan": plan_shards(row_groups, 4),
            "num_ranks": ranks,
            "feature_cols": ("id",),
            "label_cols": (),
            "sample_weight_col": None,
            "batch_size": batch_size,
            "val_batch_size": batch_size,
            "train_steps_per_epoch": plan.steps(batch_size),
            "validation_steps_per_epoch": plan.steps(batch_size),
            "random_seed": 3,
            "data_module": Numbers,
            "options": ReaderOptions(reader_pool_type="dummy", verbose=0),
            **params,
        }
    )


def steps(
    spec: DataSpec, count: int, passes: int = 1, **position: int
) -> list[tuple[list[int], float]]:
    """Return the rows of some steps, and the mean of ids computed like the ranks' gradients."""
    found: list[tuple[list[int], float]] = [([], 0.0)] * count
    for rank in range(spec.num_ranks):
        with open_data_module(
            spec, rank, spec.num_ranks, **{"epoch": 0, "epochs": 2, **position}
        ) as data:
            window = passes * spec.passes_per_batch
            batches = StepBatches(data.train_data(), data.global_train_sizes(), pytest.fail)
            for step in range(count):
                rows, mean = found[step]
                given, step_rows = batches.next_step(window)
                for batch in given:
                    ids = batch["id"].tolist()
                    rows = rows + ids
                    mean += np.sum(ids) / step_rows
                found[step] = rows, mean
    return found


GROUPS = st.lists(st.integers(1, 30), min_size=4, max_size=9)


@settings(max_examples=40)
@given(GROUPS, st.integers(1, 9), st.integers(1, 3))
def test_steps_hold_the_same_rows_for_any_number_of_ranks(
    groups: list[int], batch_size: int, passes: int
) -> None:
    # More than one epoch, because passes over the data differ.
    count = job(groups, 4, batch_size).train_steps_per_epoch // passes + 2
    expected = steps(job(groups, 4, batch_size), count, passes)
    for rows, mean in expected:
        assert mean == pytest.approx(np.mean(rows))
    for ranks in (3, 2, 1):
        found = steps(job(groups, ranks, batch_size), count, passes)
        for (rows, mean), (same, same_mean) in zip(found, expected, strict=True):
            assert sorted(rows) == sorted(same)
            assert mean == pytest.approx(same_mean)


@settings(max_examples=40)
@given(GROUPS, st.integers(1, 9), st.integers(1, 12), st.integers(0, 2), st.data())
def test_any_number_of_ranks_resumes_at_a_position_in_rows(
    groups: list[int], batch_size: int, epoch_steps: int, epoch: int, data: Any
) -> None:
    settings = {"batch_size": batch_size, "train_steps_per_epoch": epoch_steps}
    taken = data.draw(st.integers(0, epoch_steps))
    whole = steps(job(groups, 4, **settings), 3 * epoch_steps + 2)
    first = epoch * epoch_steps

    rows = job(groups, 4, **settings).rows_after(epoch, taken)

    assert rows == sum(len(ids) for ids, _ in whole[first : first + taken])
    for ranks in (4, 3):
        spec = job(groups, ranks, **settings)
        assert spec.batches_before(epoch, rows) == taken
        opened = open_data_module(spec, 0, ranks, epoch=epoch, rows=rows, epochs=3)
        for module in getattr(opened, "modules", [opened]):
            planned = range(module.skip_train_steps, module.total_train_steps)
            assert planned == range(first + taken, (epoch + 3) * epoch_steps)
        left = steps(spec, 2, epoch=epoch, rows=rows)
        for (found, _), (same, _) in zip(left, whole[first + taken :], strict=False):
            assert sorted(found) == sorted(same)


def test_positions_within_a_step_are_rejected() -> None:
    spec = job([10, 10], 2, batch_size=2)
    with pytest.raises(ValueError, match="No batch of epoch 1 ends after 3 rows"):
        open_data_module(spec, 0, 2, epoch=1, rows=3, epochs=1)


@pytest.mark.parametrize("ranks", [4, 3, 2, 1])
@pytest.mark.parametrize("limit", [1, 100])
def test_validation_reads_the_rows_of_the_shards(ranks: int, limit: int) -> None:
    # Including 2 rows for 4 shards, some of which have none.
    for groups in ([7, 8, 6], [2]):
        training = plan_shards([RowGroup("a", 0, 8)], 4)
        few = job(groups * 4, 4, 3, train_plan=training)
        plan = plan_shards([RowGroup("a", i, n) for i, n in enumerate(groups)], 4, allow_empty=True)
        spec = job(
            groups * 4,
            ranks,
            3,
            train_plan=training,
            val_plan=plan,
            validation_steps_per_epoch=min(limit, plan.steps(3)),
        )
        found: list[int] = []
        for rank in range(ranks):
            with open_data_module(spec, rank, ranks, epoch=0, epochs=1) as data:
                for again in range(2):
                    batches = [batch["id"].tolist() for batch in data.val_data()]
                    assert all(batches)
                    # The trainer, not the reader, limits a rank of one shard.
                    taken = batches[: spec.validation_steps_per_epoch * spec.passes_per_batch]
                    assert data.num_val_batches() == len(taken)
                    found += itertools.chain(*taken) if not again else []
        wanted = [
            100 * part.row_group + row
            for shard in range(4)
            for part in plan.shards[shard]
            for row in range(part.start, part.stop)
        ]
        if limit == 1:
            wanted = [
                row
                for shard in range(4)
                for row in [
                    100 * part.row_group + row
                    for part in plan.shards[shard]
                    for row in range(part.start, part.stop)
                ][: few.val_batch_size]
            ]
        assert sorted(found) == sorted(wanted)


def test_batches_without_rows_are_rejected_for_features_that_need_rows() -> None:
    job([8], 4, 2).require_rows_in_batches("x")
    with pytest.raises(DataError, match=r"x needs a row on every rank .* 6 rows for 4 ranks"):
        job([6], 4, 1).require_rows_in_batches("x")


class Users(DataModule):
    def train_data(self) -> Any:
        return iter(())

    val_data = train_data


def test_only_some_data_modules_support_several_shards() -> None:
    check_shards(Users, 4, 4, "mine")
    check_shards("arrow", 4, 1, "mine")
    check_shards(Numbers, 4, 3, "mine")
    with pytest.raises(ParamError, match=r"num_proc: the run 'mine' began with 2 ranks.* found 3"):
        check_shards(None, 2, 3, "mine")
    with pytest.raises(ParamError, match=r"data_module: .* began with 4 ranks.*Users.*num_proc=4"):
        check_shards(Users, 4, 3, "mine")
    with pytest.raises(ParamError, match="data_module"):
        open_data_module(job([9], 2, 1, data_module=Users), 0, 2, epoch=0, epochs=1)
