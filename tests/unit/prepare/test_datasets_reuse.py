"""Prepared datasets are written once, and kept while they are used. No Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from prepared_sets import Source, Writer, folders, in_threads, names, use

from hvd_estimators import clear_prepared_data, list_prepared_data
from hvd_estimators.exceptions import StoreError
from hvd_estimators.prepare.catalog import (
    load_manifest,
    manifest_path,
)
from hvd_estimators.prepare.datasets import KEPT_DATASETS, acquire

pytestmark = pytest.mark.usefixtures("cleared_cache")


def test_the_same_rows_with_the_same_options_are_written_once(store):
    write = Writer(store)
    first = use(store, write)
    assert use(store, write) == first
    others = {use(store, write, "other rows"), use(store, write, options=("other",))}
    assert first not in others
    assert len(write.written) == 1 + len(others) == 3


def test_rows_that_nobody_knows_are_written_each_time_and_deleted(store):
    write = Writer(store)
    with acquire(store, None, (), write) as index:
        assert [dataset.index for dataset in list_prepared_data(store)] == [index]
    assert folders(store) == []
    assert use(store, write, name=None) != index


def test_sources_that_change_while_they_are_read_are_not_shared(store):
    write = Writer(store)
    with acquire(store, Source("rows", current=False), (), write) as first:
        assert use(store, write) != first
        # The one that is in use stays, although nobody else may use it.
        assert store.exists(manifest_path(store, first))
    assert not store.exists(manifest_path(store, first))


def test_threads_wait_for_the_one_that_writes(store):
    write = Writer(store, seconds=0.2)
    indices = in_threads(6, lambda: use(store, write))
    assert write.written == [indices[0]]
    assert set(indices) == {indices[0]}


def test_what_one_thread_failed_to_write_another_writes(store):
    write = Writer(store, seconds=0.2, failures=1)
    results = in_threads(4, lambda: use(store, write))
    failed = [result for result in results if isinstance(result, OSError)]
    assert [str(error) for error in failed] == ["the disk is full"]
    assert len(write.written) == 2
    assert {result for result in results if result not in failed} == {write.written[1]}
    assert folders(store) == names(write.written[1])


@pytest.mark.parametrize("lost", ["_manifest.json", "part.parquet", ""])
def test_what_somebody_damaged_is_written_again(store, lost):
    write = Writer(store)
    first = use(store, write)
    store.delete(f"{store.get_train_data_path(first)}/{lost}")
    second = use(store, write)
    assert second != first
    assert use(store, write) == second
    assert folders(store) == names(second)


def test_the_last_used_few_are_kept_and_those_in_use(store):
    write = Writer(store)
    with acquire(store, Source("in use"), (), write) as in_use:
        indices = [use(store, write, str(i)) for i in range(KEPT_DATASETS)]
        assert use(store, write, "0") == indices[0]  # now the one that was used last
        newest = use(store, write, "newest")
        kept = {dataset.index for dataset in list_prepared_data(store)}
        assert kept == {in_use, newest, *indices} - {indices[1]}
    assert len(list_prepared_data(store)) == KEPT_DATASETS


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
def test_a_damaged_manifest_breaks_neither_listing_nor_clearing_nor_the_next_fit(store, document):
    write = Writer(store)
    first, other = use(store, write), use(store, write, "other")
    Path(manifest_path(store, first)).write_bytes(document)
    with pytest.raises(StoreError, match=rf"dataset '{first}' is damaged .*Prepare the data again"):
        load_manifest(store, first)
    assert [d.index for d in list_prepared_data(store)] == [other]
    second = use(store, write)
    assert folders(store) == sorted(names(other) + names(second))
    Path(manifest_path(store, second)).write_bytes(document)
    assert {d.index for d in clear_prepared_data(store)} == {other, second}
    assert folders(store) == []
