"""Parquet on a real S3 and a real HDFS: delivered rows and requests. No Spark."""

from __future__ import annotations

import contextlib
import io
import uuid

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from servers.fault_proxy import FaultProxy

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.remote_reads import HOLE_BYTES
from hvd_estimators.exceptions import StoreError
from hvd_estimators.loading.interleave import one_per_group
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import Store

pytestmark = pytest.mark.timeout(180)

READERS = {"arrow": ArrowDataModule}
with contextlib.suppress(ImportError):  # it cannot be installed with today's PyArrow
    from hvd_estimators.loading.petastorm import PetastormDataModule

    READERS["petastorm"] = PetastormDataModule

FILES, GROUPS, ROWS, EPOCHS = 2, 3, 40, 2
RUNS = 2
"""Runs of adjacent columns per row group: two columns, and one after a wide column."""


def make_dataset(store):
    """Write files larger than a footer request, and describe them."""
    for number in range(FILES):
        ids = np.arange(number * GROUPS * ROWS, (number + 1) * GROUPS * ROWS)
        wide = [bytes(2 * HOLE_BYTES // ROWS)] * len(ids)
        table = pa.table({"id": ids, "half": ids / 2, "wide": wide, "twice": 2 * ids})
        with store.open_atomic(f"{store.prefix_path}/data/{number}.parquet") as file:
            options = {"compression": "none", "use_dictionary": False}
            parquet.write_table(table, file, row_group_size=ROWS, **options)
    return read_manifest(store, f"{store.prefix_path}/data", None, ["id", "half", "twice"])


def read_epochs(reader, store, manifest):
    """Read for training and for validation, epoch after epoch, and return the row numbers."""
    plan = plan_shards(manifest.train.row_groups, 1)
    ids = []
    with READERS[reader](
        train_dir=manifest.train.path,
        val_dir=manifest.train.path,
        columns=manifest.columns,
        train_plan=plan,
        val_plan=plan,
        store=store,
    ) as module:
        for _ in range(EPOCHS):
            for part in module.read(iter([one_per_group(plan.shards[0])]), 2):
                assert (part["half"] == part["id"] / 2).all()
                assert (part["twice"] == part["id"] * 2).all()
                ids += part["id"].tolist()
            for batch in module.val_data():
                ids += batch["id"].tolist()
    return ids


@pytest.mark.parametrize("reader", READERS)
def test_s3_gets_one_request_per_run_of_columns_and_per_footer(s3, reader):
    store = Store.create(f"{s3.new_bucket()}/data", storage_options=s3.storage_options)
    manifest = make_dataset(store)
    before = len(s3.requests())
    ids = read_epochs(reader, store, manifest)
    requests = s3.requests()[before:]
    assert ids == 2 * EPOCHS * list(range(FILES * GROUPS * ROWS))
    assert {request.method for request in requests} == {"GET"}
    footers = [request for request in requests if request.range.startswith("bytes=-")]
    assert len(footers) == len({request.path for request in footers}) == FILES
    assert len(requests) == FILES + 2 * EPOCHS * FILES * GROUPS * RUNS


@pytest.mark.parametrize("reader", READERS)
def test_reads_from_hdfs(hdfs, reader):
    store = Store.create(f"{hdfs.url}/{uuid.uuid4().hex}")
    manifest = make_dataset(store)
    ids = read_epochs(reader, store, manifest)
    assert ids == 2 * EPOCHS * list(range(FILES * GROUPS * ROWS))


@pytest.mark.parametrize("reader", READERS)
def test_s3_gets_one_request_per_small_file(s3, reader):
    """One when the driver plans, and one when a rank reads, over all epochs."""
    store = Store.create(f"{s3.new_bucket()}/data", storage_options=s3.storage_options)
    folder, files = f"{store.prefix_path}/data", 5
    for number in range(files):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        with store.open_atomic(f"{folder}/{number}.parquet") as file:
            parquet.write_table(pa.table({"id": ids, "half": ids / 2, "twice": 2 * ids}), file)
    before = len(s3.requests())
    manifest = read_manifest(store, folder, None, ["id", "half", "twice"])
    planned = len(s3.requests())
    assert read_epochs(reader, store, manifest) == 2 * EPOCHS * list(range(files * ROWS))
    for requests in (s3.requests()[before:planned], s3.requests()[planned:]):
        # Listing the folder takes requests as well, but not for each file.
        paths = [request.path for request in requests if request.path.endswith(".parquet")]
        assert len(paths) == len(set(paths)) == files


@pytest.mark.parametrize("rows", [ROWS, 2**15])
@pytest.mark.parametrize("kind", ["cut answer", "short answer"])
def test_truncated_ends_of_files_on_s3_are_read_again(s3, kind, rows):
    """The file is smaller than a footer request, or larger."""
    bucket = s3.new_bucket()
    table = pa.table({"id": np.arange(rows)})
    direct = Store.create(f"{bucket}/data", storage_options=s3.storage_options)
    with direct.open_atomic(f"{direct.prefix_path}/data/0.parquet") as file:
        parquet.write_table(table, file, compression="none", use_dictionary=False)
    with FaultProxy(s3.port) as proxy:
        options = s3.options(endpoint=proxy.endpoint)
        store = Store.create(direct.prefix_path, storage_options=options)
        fault = proxy.fault(
            kind, matches=lambda method, path: method == "GET" and ".parquet" in path, times=2
        )
        (group,) = read_manifest(store, f"{store.prefix_path}/data", None, ["id"]).train.row_groups
    assert fault.happened == 2
    assert group.rows == rows


def test_a_truncated_file_on_s3_is_damaged(s3):
    store = Store.create(f"{s3.new_bucket()}/data", storage_options=s3.storage_options)
    path = f"{store.prefix_path}/data/0.parquet"
    content = io.BytesIO()
    parquet.write_table(pa.table({"id": np.arange(ROWS)}), content)
    with store.open_atomic(path) as file:
        file.write(content.getvalue()[:-20])
    with pytest.raises(StoreError, match=path):
        read_manifest(store, f"{store.prefix_path}/data", None, ["id"])
