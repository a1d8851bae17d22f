"""Listing and clearing of prepared and partly written datasets. No Spark."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from json_values import NO_JSON
from prepared_sets import Writer, folders, use

from hvd_estimators import clear_prepared_data, list_prepared_data
from hvd_estimators._util.process_identity import ProcessIdentity, this_process
from hvd_estimators.exceptions import StoreError
from hvd_estimators.prepare import datasets
from hvd_estimators.prepare.datasets import (
    acquire,
    load_manifest,
    manifest_path,
    owner_path,
    split_path,
)
from hvd_estimators.store import LocalStore
from hvd_estimators.store.leases import STALE_SECONDS, LeaseRecord

pytestmark = pytest.mark.usefixtures("cleared_cache")


def test_listed_datasets_describe_their_content(store):
    with acquire(store, Writer(store)) as index:
        (dataset,) = list_prepared_data(store)
        assert (dataset.index, dataset.rows, dataset.validation_rows) == (index, 5, 0)
        assert dataset.columns == ("x",)
        assert dataset.num_bytes == 8 + len(store.read(manifest_path(store, index)))
        assert abs(dataset.created.timestamp() - time.time()) < 60


def test_datasets_are_written_each_time_and_deleted_after_their_block(store):
    write = Writer(store)
    with acquire(store, write) as first:
        assert [dataset.index for dataset in list_prepared_data(store)] == [first]
        second = use(store, write)
        assert [dataset.index for dataset in list_prepared_data(store)] == [first]
    assert write.written == [first, second]
    assert folders(store) == []


def test_datasets_of_failed_writers_are_deleted(store):
    with pytest.raises(OSError, match="the disk is full"):
        use(store, Writer(store, failures=1))
    assert folders(store) == []


@pytest.mark.parametrize("content", [b"\xff\xfe", *NO_JSON])
def test_a_damaged_manifest_is_an_error_that_names_the_file(store, content):
    with acquire(store, Writer(store)) as index:
        path = manifest_path(store, index)
        Path(path).write_bytes(content)
        with pytest.raises(StoreError, match=f"is damaged .*{path}"):
            load_manifest(store, index)
        list_prepared_data(store)


def test_clearing_one_dataset_keeps_the_others_and_returns_it(store, tmp_path):
    elsewhere = LocalStore(str(tmp_path / "elsewhere"))
    first, second, other = "0123456789ab", "123456789abc", "23456789abcd"
    for place, index in ((store, first), (store, second), (elsewhere, other)):
        Writer(place)(index)
        # As after an interrupt, when the block's heartbeat is garbage-collected.
        datasets._own[index] = place, lambda: None
    assert [d.index for d in clear_prepared_data(store, first)] == [first]
    assert [d.index for d in list_prepared_data(store)] == [second]
    assert [d.index for d in list_prepared_data(elsewhere)] == [other]
    assert [d.index for d in clear_prepared_data(store)] == [second]
    assert [d.index for d in list_prepared_data(elsewhere)] == [other]


def test_clearing_keeps_datasets_in_use(store):
    write = Writer(store)
    left = "0123456789ab"
    with acquire(store, write) as in_use:
        write(left)
        assert clear_prepared_data(store, in_use) == []
        assert clear_prepared_data(store, "ba9876543210") == []
        assert [dataset.index for dataset in clear_prepared_data(store, left)] == [left]
        assert [dataset.index for dataset in list_prepared_data(store)] == [in_use]


class OneFolder(LocalStore):
    """Store that has one folder for all datasets, as those of horovod.spark's own tests."""

    def get_train_data_path(self, idx=None):
        return super().get_train_data_path()

    def get_val_data_path(self, idx=None):
        return super().get_val_data_path()


def test_a_store_with_one_folder_keeps_the_validation_rows_of_others(tmp_path):
    store = OneFolder(str(tmp_path))
    other = f"{store.get_val_data_path()}/part-0.parquet"
    with acquire(store, Writer(store)) as index:
        assert load_manifest(store, index).train.rows == 5
        store.write_text(other, "rows")
    assert not store.exists(store.get_train_data_path())
    assert store.exists(other)
    with pytest.raises(StoreError, match=r"^store: there are files in .*intermediate_val_data'"):
        use(store, Writer(store))
    assert store.exists(other)


def test_a_store_with_one_folder_has_one_writer_at_a_time(tmp_path):
    store = OneFolder(str(tmp_path))
    half = f"{split_path(store, 'any')}/part-0.parquet"

    def write(index):
        store.write_text(half, "rows")
        with pytest.raises(StoreError, match=r"^store: another fit, or prepare_data, writes or"):
            use(store, Writer(store))
        assert store.exists(half)
        Writer(store)(index)

    with acquire(store, write) as index:
        assert load_manifest(store, index).train.rows == 5
    use(store, Writer(store))


def test_only_folders_with_names_of_datasets_are_cleared(store):
    root = Path(store.prefix_path)
    for name in (
        "runs",
        "intermediate_train_data",
        "intermediate_train_data.mine",
        "intermediate_train_data.0123456789ab.old",
        "x.intermediate_train_data.0123456789ab",
    ):
        (root / name).mkdir(parents=True)
    before = folders(store)
    assert clear_prepared_data(store) == []
    assert folders(store) == before


@pytest.mark.parametrize(
    "owner", [None, "", "{", '{"machine": "another", "pid": 1, "started": "1"}']
)
def test_datasets_of_unknown_owners_are_kept(store, owner):
    Writer(store)("0123456789ab")
    if owner is not None:
        store.write_text(owner_path(store, "0123456789ab"), owner)
    use(store, Writer(store))
    clear_prepared_data(store)
    assert [d.index for d in list_prepared_data(store)] == ["0123456789ab"]
    assert len(clear_prepared_data(store, force=True)) == 1
    assert folders(store) == []


def make_foreign(store, path, seconds):
    """Make a claim look like another machine's, with its last heartbeat some time ago."""
    claim = LeaseRecord.from_json(store.read(path))
    other = dataclasses.replace(claim, owner=ProcessIdentity("another", 1, "1"))
    store.write_text(path, other.to_json())
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("by", ["clearing", "the next application"])
def test_datasets_of_another_machine_expire_without_heartbeats(store, by):
    left = "0123456789ab"
    Writer(store)(left)
    owner = owner_path(store, left)
    store.write_text(owner, LeaseRecord(this_process(), token="t").to_json())

    def cleared():
        if by == "clearing":
            clear_prepared_data(store)
        else:
            use(store, Writer(store))
        return left not in [d.index for d in list_prepared_data(store)]

    # A minute of silence is a pause.
    for silence, gone in ((60, False), (STALE_SECONDS + 1, True)):
        make_foreign(store, owner, silence)
        assert cleared() is gone
    clear_prepared_data(store)
    assert folders(store) == []


def test_an_interrupted_deletion_leaves_no_listed_dataset(store, monkeypatch):
    index = "0123456789ab"
    Writer(store)(index)
    delete = type(store).delete

    def fail_second(store, path):
        if not deleted:
            deleted.append(path)
            return delete(store, path)
        raise OSError("interrupted")

    deleted = []
    with monkeypatch.context() as patched:
        patched.setattr(type(store), "delete", fail_second)
        with pytest.raises(OSError, match="interrupted"):
            clear_prepared_data(store, index)
    assert list_prepared_data(store) == []
    assert store.exists(store.get_train_data_path(index))
    assert [d.index for d in clear_prepared_data(store, index)] == [index]
    assert folders(store) == []


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"columns": 3}',
    b'{"columns": [{"name": "x"}], "train": null, "validation": null}',
    b'{"columns": [], "train": {"path": "", "row_groups": [{"rows": "many"}]}}',
]


@pytest.mark.parametrize("document", DAMAGED)
def test_corrupted_manifests_do_not_break_listing_clearing_or_fits(store, document):
    write = Writer(store)
    with acquire(store, write) as first, acquire(store, write) as other:
        Path(manifest_path(store, first)).write_bytes(document)
        message = rf"dataset '{first}' is damaged .*Prepare the data again"
        with pytest.raises(StoreError, match=message):
            load_manifest(store, first)
        assert [d.index for d in list_prepared_data(store)] == [other]
        use(store, write)
    assert folders(store) == []
    left = "0123456789ab"
    write(left)
    Path(manifest_path(store, left)).write_bytes(document)
    assert [d.index for d in clear_prepared_data(store, left)] == [left]
    assert folders(store) == []
