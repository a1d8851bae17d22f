"""Memory use of reading, and shuffle quality, estimated from footers."""

import numpy as np
import pyarrow as pa
import pytest
from foreign import describe
from pyarrow import parquet

from hvd_estimators.data.manifest import ColumnSpec, RowGroup
from hvd_estimators.data.remote_reads import FETCHED_BYTES
from hvd_estimators.loading.plan import order_warning, plan_shards

MIB = 2**20
SPECS = [ColumnSpec("x", "vector", "float32", (64,))]


def open_bytes(folder, **options):
    """Write two million bytes in one row group, and return its memory use when open."""
    folder.mkdir()
    values = np.random.default_rng(0).standard_normal(500_000, np.float32)
    table = pa.table({"x": values, "unused": values})
    parquet.write_table(table, folder / "a.parquet", **options)
    (group,) = describe(folder, "x").train.row_groups
    return group.open_bytes


def test_an_open_row_group_holds_a_page_and_a_dictionary_per_column(tmp_path):
    plain = {"use_dictionary": False, "compression": None}
    assert open_bytes(tmp_path / "plain", **plain) == MIB + FETCHED_BYTES
    with_dictionary = open_bytes(tmp_path / "dictionary", compression=None)
    assert MIB + FETCHED_BYTES < with_dictionary <= 2 * MIB + FETCHED_BYTES


def layout(groups, rows_each):
    return [RowGroup("a.parquet", i, rows_each, 2 * MIB) for i in range(groups)]


@pytest.mark.parametrize(
    ("groups", "group_mib", "ranks", "warns"),
    [
        (64, 16, 2, False),
        (8, 128, 2, False),
        (1, 1024, 2, True),
        (4, 256, 1, True),
        (1, 256, 1, False),  # a buffer of half the rows mixes them well enough
        (1, 1024, 8, False),  # each rank has an eighth, which fits its buffer
        (1, 8192, 8, False),  # reads at eight positions at a time
    ],
)
def test_poorly_shuffled_files_cause_a_warning(groups, group_mib, ranks, warns):
    row_groups = layout(groups, group_mib * MIB // 256)
    plan = plan_shards(row_groups, ranks, seed=0, open_bytes=128 * MIB)

    warning = order_warning(row_groups, plan, SPECS, 128 * MIB)

    assert (warning is not None) == warns
    if warns:
        rows = group_mib * MIB // 256
        assert f"{groups} row groups of up to {rows} rows ({group_mib} MiB in memory)" in warning
        assert "shuffle_buffer_size is 128 MiB" in warning
        assert "hvd_estimators.prepare_data" in warning


def test_a_buffer_for_all_rows_avoids_the_warning():
    row_groups = layout(1, 1024 * MIB // 256)
    plan = plan_shards(row_groups, 1, seed=0, open_bytes=1024 * MIB)

    assert order_warning(row_groups, plan, SPECS, 128 * MIB) is not None
    assert order_warning(row_groups, plan, SPECS, 1024 * MIB) is None
