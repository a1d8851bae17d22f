"""The data module of a rank, and its arguments."""

import dataclasses
import itertools
import socket
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.exceptions import DataError, DependencyError
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.loading.spec import (
    DataSpec,
    ReaderOptions,
    check_data_module,
    choose_data_module,
    open_data_module,
)
from hvd_estimators.store import LocalStore


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    table = pa.table({"id": np.arange(53), "x": np.arange(53.0)})
    parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    return read_manifest(LocalStore(str(folder)), str(folder), None, ["id", "x"])


class Constant(DataModule):
    """User-written data module."""

    def __init__(self, *, label_cols, **kwargs):
        super().__init__(**kwargs)
        self.label_cols = label_cols

    def train_data(self):
        return itertools.repeat({"x": np.zeros(self.train_batch_size)})

    def val_data(self):
        return iter(())


def data_spec(manifest, data_module):
    return DataSpec(
        columns=manifest.columns,
        train_path=manifest.train.path,
        val_path=None,
        train_plan=plan_shards(manifest.train.row_groups, 2),
        val_plan=None,
        num_ranks=2,
        feature_cols=("x",),
        label_cols=("id",),
        sample_weight_col=None,
        batch_size=4,
        val_batch_size=8,
        train_steps_per_epoch=7,
        validation_steps_per_epoch=0,
        random_seed=7,
        data_module=data_module,
        options=ReaderOptions(shuffle=False, verbose=0),
    )


@pytest.mark.parametrize("data_module", ["arrow", None])
def test_the_ranks_module_is_created_from_the_data_spec(manifest, data_module):
    spec = data_spec(manifest, choose_data_module(data_module))
    with open_data_module(spec, 1, 2, epoch=0, rows=3 * 2 * 4, epochs=1) as data:
        batches = [batch["id"].tolist() for batch in itertools.islice(data.train_data(), 4)]

    # The second of 2 ranks has rows 26 to 52; 3 batches of 4 were used before.
    assert list(itertools.chain(*batches)) == list(range(26 + 12, 53))


def test_the_driver_chooses_petastorm_if_it_can_import_it(monkeypatch, caplog):
    caplog.set_level("INFO")
    try:
        import petastorm
    except ImportError:
        petastorm = None
    assert choose_data_module(None) == ("arrow" if petastorm is None else "petastorm")
    assert choose_data_module(Constant) is Constant
    monkeypatch.setitem(sys.modules, "hvd_estimators.loading.petastorm", None)
    assert choose_data_module(None) == "arrow"
    assert caplog.messages[-1] == "data_module: 'arrow' reads the rows on all ranks"
    with pytest.raises(DependencyError, match="cannot be imported"):
        check_data_module("petastorm")


def test_ranks_read_with_the_drivers_choice(manifest, monkeypatch):
    with open_data_module(data_spec(manifest, "arrow"), 0, 2, epoch=0, epochs=1) as data:
        assert data.short_name == "arrow"
    monkeypatch.setitem(sys.modules, "petastorm.workers_pool", None)
    monkeypatch.delitem(sys.modules, "hvd_estimators.loading.petastorm", raising=False)
    message = rf"the driver chose 'petastorm'.*{socket.gethostname()} cannot import .*petastorm"
    with pytest.raises(DependencyError, match=message):
        open_data_module(data_spec(manifest, "petastorm"), 0, 2, epoch=0, epochs=1)


def test_custom_data_modules_get_all_arguments(manifest):
    with open_data_module(data_spec(manifest, Constant), 1, 2, epoch=0, epochs=5) as opened:
        data = opened.module
        assert type(data) is Constant
        assert len(next(opened.train_data())["x"]) == 4
        assert (data.cur_shard, data.shard_count, data.num_train_epochs) == (1, 2, 5)
        assert (data.has_val, data.val_batch_size, data.shuffle) == (False, 8, False)
        assert list(data.schema_fields) == ["id", "x"]
        assert data.label_cols == ("id",)
        assert data.global_train_sizes() is None


class Numbered(Constant):
    """Data module that numbers its batches."""

    def train_data(self):
        return ({"x": np.full(4, float(number))} for number in itertools.count())

    def global_train_sizes(self):
        return itertools.count(100)


class Skipping(Numbered):
    skips_train_steps = True

    def train_data(self):
        return itertools.islice(super().train_data(), self.skip_train_steps, None)

    def global_train_sizes(self):
        return itertools.count(100 + self.skip_train_steps)


@pytest.mark.parametrize("data_module", [Numbered, Skipping])
@pytest.mark.parametrize(("epoch", "batches"), [(0, 0), (0, 2), (1, 0), (2, 3)])
def test_custom_data_modules_resume_at_the_runs_position(manifest, data_module, epoch, batches):
    spec = data_spec(manifest, data_module)
    rows = 2 * 4 * batches
    with open_data_module(spec, 1, 2, epoch=epoch, rows=rows, epochs=5 - epoch) as data:
        numbers = [batch["x"][0] for batch in itertools.islice(data.train_data(), 3)]
        sizes = list(itertools.islice(data.global_train_sizes(), 3))
        assert data.module.num_train_epochs == 5
    done = 7 * epoch + batches
    assert numbers == [done, done + 1, done + 2]
    assert sizes == [100 + done, 101 + done, 102 + done]


class Ending(Constant):
    """Data module with ten training batches, whose validation batches suffice for one pass."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.val = iter([{"x": np.zeros(2)}] * 2)

    def train_data(self):
        return iter([{"x": np.zeros(4)}] * 10)

    def val_data(self):
        return self.val


def test_running_out_of_training_batches_is_an_error(manifest):
    with open_data_module(data_spec(manifest, Ending), 1, 2, epoch=1, rows=8, epochs=3) as data:
        batches = data.train_data()
        # The first 8 batches came before; an epoch has 7.
        assert len(list(itertools.islice(batches, 2))) == 2
        message = r"Rank 1, epoch 1 .*Ending\.train_data\(\) ended after 3 of 7 .*\(10 in all\)"
        with pytest.raises(DataError, match=message):
            next(batches)


def test_running_out_of_validation_batches_is_an_error(manifest):
    spec = data_spec(manifest, Ending)
    spec = dataclasses.replace(spec, val_plan=spec.train_plan, validation_steps_per_epoch=3)
    with open_data_module(spec, 1, 2, epoch=0, epochs=1) as data:
        assert len(list(data.val_data())) == 2
        with pytest.raises(
            DataError, match=r"Rank 1: .* after 0 batches; expected 2 .* passes bef"
        ):
            list(data.val_data())
    with (
        open_data_module(
            dataclasses.replace(spec, data_module=Constant), 0, 2, epoch=0, epochs=1
        ) as data,
        pytest.raises(DataError, match=r"Rank 0: Constant.val_data\(\) ended .* expected 1 at"),
    ):
        next(data.val_chunks())
    # Without validation rows, no batches are requested.
    with open_data_module(data_spec(manifest, Constant), 0, 2, epoch=0, epochs=1) as data:
        assert list(data.val_data()) == []
