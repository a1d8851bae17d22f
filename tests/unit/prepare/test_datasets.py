"""Prepared datasets are listed and cleared, and what is left of half of one. No Spark."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from prepared_sets import Source, Writer, folders, use

from hvd_estimators import clear_prepared_data, list_prepared_data
from hvd_estimators._util.process_identity import ProcessIdentity, this_process
from hvd_estimators.prepare.catalog import (
    manifest_path,
    new_hold_path,
    owner_path,
)
from hvd_estimators.prepare.datasets import KEPT_DATASETS, acquire, pin
from hvd_estimators.store.leases import STALE_SECONDS, LeaseRecord

pytestmark = pytest.mark.usefixtures("cleared_cache")


def test_a_dataset_tells_what_it_is(store):
    write = Writer(store)
    index = use(store, write)
    (dataset,) = list_prepared_data(store)
    assert (dataset.index, dataset.rows, dataset.validation_rows) == (index, 5, 0)
    assert dataset.columns == ("x",)
    assert dataset.num_bytes == 8 + len(store.read(manifest_path(store, index)))
    assert abs(dataset.created.timestamp() - time.time()) < 60


def test_clearing_leaves_what_is_in_use(store):
    write = Writer(store)
    idle = use(store, write, "idle")
    with acquire(store, Source("in use"), (), write) as in_use:
        assert clear_prepared_data(store, in_use) == []
        assert [dataset.index for dataset in clear_prepared_data(store)] == [idle]
        assert [dataset.index for dataset in list_prepared_data(store)] == [in_use]
    assert use(store, write, "in use") == in_use
    assert use(store, write, "idle") != idle


def test_one_dataset_is_cleared_and_one_that_is_held_is_not(store):
    write = Writer(store)
    first, second = use(store, write, "1"), use(store, write, "2")
    with pin(store, second):
        assert clear_prepared_data(store, second) == []
        for i in range(KEPT_DATASETS + 1):
            use(store, write, f"more {i}")
        assert store.exists(manifest_path(store, second))
    assert not store.exists(manifest_path(store, first))
    assert [dataset.index for dataset in clear_prepared_data(store, write.written[-1])] == [
        write.written[-1]
    ]
    assert clear_prepared_data(store, "0123456789ab") == []


def test_only_what_is_named_like_a_dataset_is_cleared(store):
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
def test_what_cannot_be_known_to_be_left_is_left_alone(store, owner):
    Writer(store)("0123456789ab")
    if owner is not None:
        store.write_text(owner_path(store, "0123456789ab"), owner)
    use(store, Writer(store))
    clear_prepared_data(store)
    assert [d.index for d in list_prepared_data(store)] == ["0123456789ab"]
    assert len(clear_prepared_data(store, force=True)) == 1
    assert folders(store) == []


def make_foreign(store, path, seconds):
    """Let a claim be of another machine, and its last heartbeat some time ago."""
    claim = LeaseRecord.from_json(store.read(path))
    other = dataclasses.replace(claim, owner=ProcessIdentity("another", 1, "1"))
    store.write_text(path, other.to_json())
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("by", ["clearing", "the next application"])
def test_what_another_machine_left_goes_when_it_has_been_silent_for_long(store, by):
    left = "0123456789ab"
    Writer(store)(left)
    owner, holder = owner_path(store, left), new_hold_path(store, left)
    for path in (owner, holder):
        store.write_text(path, LeaseRecord(this_process(), token="t").to_json())

    def cleared():
        if by == "clearing":
            clear_prepared_data(store)
        else:
            use(store, Writer(store), name=None)
        return left not in [d.index for d in list_prepared_data(store)]

    # A minute of silence is a pause.
    for owners_silence, readers_silence, gone in (
        (60, 60, False),
        (STALE_SECONDS + 1, 60, False),
        (60, STALE_SECONDS + 1, False),
        (STALE_SECONDS + 1, STALE_SECONDS + 1, True),
    ):
        make_foreign(store, owner, owners_silence)
        make_foreign(store, holder, readers_silence)
        assert cleared() is gone
    clear_prepared_data(store)
    assert folders(store) == []


def test_who_deletes_a_dataset_and_is_interrupted_leaves_nothing_that_looks_whole(
    store, monkeypatch
):
    index = use(store, Writer(store))
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
            clear_prepared_data(store)
    assert list_prepared_data(store) == []
    assert store.exists(store.get_train_data_path(index))
    assert [d.index for d in clear_prepared_data(store)] == [index]
    assert folders(store) == []
