"""Rows of any type and length: each reaches one batch of an epoch, with its value."""

from __future__ import annotations

import datetime
import decimal
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.manifest import ColumnSpec, JoinedSpec, RowRange
from hvd_estimators.data.remote_reads import RangeFiles, RangeRead
from hvd_estimators.data.rows import ROWS, RowTable
from hvd_estimators.exceptions import DataError, StoreError
from hvd_estimators.inference.batch import BatchPredictor
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.loading.collate_fn import CollateFunction
from hvd_estimators.loading.interleave import PART_BYTES, read_tables
from hvd_estimators.loading.plan import order_warning, plan_shards
from hvd_estimators.loading.readers import ArrowDataModule, VirtualShards
from hvd_estimators.loading.shuffle import stream_batches
from hvd_estimators.store import LocalStore

NUMBERS = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
}
OTHERS = {
    pa.string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(datetime.UTC)),
    pa.decimal128(9, 2): st.decimals("-9999999", "9999999", places=2),
}
KINDS = st.recursive(
    st.sampled_from([*NUMBERS, *OTHERS]),
    lambda kinds: st.one_of(
        kinds.map(pa.list_),
        st.sampled_from(list(NUMBERS)).map(pa.list_),
        st.lists(kinds, min_size=1, max_size=2).map(
            lambda fields: pa.struct([(f"f{number}", kind) for number, kind in enumerate(fields)])
        ),
        kinds.map(lambda kind: pa.map_(pa.string(), kind)),
    ),
    max_leaves=4,
)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return a strategy of a type's values in PyArrow's form, also null."""
    return st.none() | present(kind)


def present(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_map(kind):
        keys = st.text(max_size=2)
        return st.lists(
            st.tuples(keys, values(kind.item_type)), max_size=3, unique_by=lambda e: e[0]
        )
    if pa.types.is_list(kind):
        return st.lists(values(kind.value_type), max_size=4)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    return {**NUMBERS, **OTHERS}[kind]


def expected(value: Any, kind: pa.DataType) -> Any:
    """Return what a function of the user must get for a value."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: expected(item, kind.item_type) for key, item in value}
    if pa.types.is_list(kind):
        is_decimal = pa.types.is_decimal(kind.value_type)
        if (is_decimal or kind.value_type in NUMBERS) and None not in value:
            numbers = [expected(each, kind.value_type) for each in value]
            return np.array(numbers, float if is_decimal else kind.value_type.to_pandas_dtype())
        return [expected(each, kind.value_type) for each in value]
    if pa.types.is_struct(kind):
        return {field.name: expected(value[field.name], field.type) for field in kind}
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, datetime.datetime):
        return value.replace(tzinfo=None)
    return value


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert found.flags.writeable
        np.testing.assert_array_equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for each, other in zip(found, wanted, strict=True):
            assert_same(each, other)
    else:
        assert found == wanted


def as_they_are(rows: list[dict[str, Any]]) -> Any:
    return torch.tensor([row["id"] for row in rows]), rows


COLLATE = CollateFunction(None, as_they_are)


@st.composite
def tables(draw: Callable[..., Any]) -> tuple[pa.Table, list[dict[str, Any]]]:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3))
    count = draw(st.integers(1, 23))
    columns = {
        f"c{i}": draw(st.lists(values(k), min_size=count, max_size=count))
        for i, k in enumerate(kinds)
    }
    arrays = {name: pa.array(c, k) for (name, c), k in zip(columns.items(), kinds, strict=True)}
    rows = [
        {
            "id": row,
            **{n: expected(c[row], k) for (n, c), k in zip(columns.items(), kinds, strict=True)},
        }
        for row in range(count)
    ]
    return pa.table({"id": np.arange(count), **arrays}), rows


def open_shards(
    folder: str, names: list[str], shards: int, **options: Any
) -> list[ArrowDataModule]:
    """Return the reader of each shard."""
    manifest = read_manifest(
        LocalStore(folder), folder, folder, names, allow_text=dict.fromkeys(names, "any")
    )
    return [
        ArrowDataModule(
            train_dir=folder,
            val_dir=folder,
            columns=(JoinedSpec(ROWS, "rows", "object", members=manifest.columns),),
            train_plan=plan_shards(manifest.train.row_groups, shards, seed=3),
            val_plan=plan_shards(manifest.train.row_groups, shards, allow_empty=True),
            cur_shard=shard,
            shard_count=shards,
            random_seed=5,
            steps_per_epoch_val=1000,
            **{"collate": COLLATE, "total_train_steps": None, **options},
        )
        for shard in range(shards)
    ]


def epoch(module: ArrowDataModule, passes: int = 1) -> list[CollatedBatch]:
    steps = module.train_plan.steps(module.train_batch_size)
    with module:
        return list(itertools.islice(module.train_chunks(), steps * passes))


@settings(suppress_health_check=list(HealthCheck), max_examples=60)
@given(
    tables(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.booleans()
)
def test_each_row_is_in_one_batch_of_an_epoch_with_its_value(
    made: tuple[pa.Table, list[dict[str, Any]]],
    shards: int,
    batch_size: int,
    group: int,
    shuffle: bool,
    cache: bool,
) -> None:
    table, rows = made
    shards = min(shards, len(rows))
    with tempfile.TemporaryDirectory() as folder:
        parquet.write_table(table, Path(folder, "part.parquet"), row_group_size=group)
        options = {"shuffle": shuffle, "inmemory_cache_all": cache, "train_batch_size": batch_size}
        modules = open_shards(folder, table.column_names, shards, **options)
        batches = [epoch(module, passes=2) for module in modules]
        found = {0: [], 1: []}
        for module, of_shard in zip(modules, batches, strict=True):
            steps = module.train_plan.steps(batch_size)
            sizes = list(module.train_plan.batch_sizes([module.cur_shard], batch_size))
            assert [batch.rows for batch in of_shard] == sizes * 2
            if not shuffle:
                ranges = module.train_plan.shards[module.cur_shard]
                planned = [
                    group * part.row_group + row
                    for part in ranges
                    for row in range(part.start, part.stop)
                ]
                read = [i for batch in of_shard if batch.rows for i in batch.value[0].tolist()]
                assert read == planned * 2
            for step, batch in enumerate(of_shard):
                if batch.rows:
                    ids, given_rows = batch.value
                    assert ids.tolist() == [row["id"] for row in given_rows]
                    found[step // steps] += given_rows
        for of_epoch in found.values():
            assert sorted(row["id"] for row in of_epoch) == list(range(len(rows)))
            for row in of_epoch:
                assert_same(row, rows[row["id"]])
    # Predictions read the same columns, in the batches of Spark.
    predicts = BatchPredictor(tuple(table.column_names), InputColumns(), True, collate=COLLATE)
    for batch in table.to_batches(max_chunksize=group):
        columns, valid = predicts.read(batch.columns)
        (collated,) = predicts.inputs(columns, None)
        assert valid is None
        for row in collated.value[1]:
            assert_same(row, rows[row["id"]])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """Write rows with arrays of 0 to 6 numbers."""
    folder = tmp_path_factory.mktemp("texts")
    tokens = [list(range(row, row + row % 7)) for row in range(53)]
    for part in range(3):
        ids = range(part, len(tokens), 3)
        table = pa.table({"id": list(ids), "tokens": [tokens[row] for row in ids]})
        parquet.write_table(table, folder / f"part-{part}.parquet", row_group_size=4)
    return str(folder), tokens


def marked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids = torch.tensor([row["id"] for row in rows])
    return {"id": ids, "noise": torch.rand(len(rows)), "process": os.getpid()}


def test_processes_collate_in_order_and_with_the_same_random_numbers(texts: Any) -> None:
    folder, _ = texts
    found = []
    for workers in (1, 3):
        (module,) = open_shards(
            folder,
            ["id", "tokens"],
            1,
            collate=CollateFunction(None, marked),
            reader_pool_type="process",
            train_reader_worker_count=workers,
            train_batch_size=4,
        )
        found.append(epoch(module, passes=2))
        processes = {batch.value["process"] for batch in found[-1]}
        assert len(processes) == workers
        assert os.getpid() not in processes
    for name in ("id", "noise"):
        one, several = ([b.value[name].tolist() for b in batches] for batches in found)
        assert one == several
    (module,) = open_shards(folder, ["id", "tokens"], 1, train_batch_size=4)
    assert [b.value[0].tolist() for b in epoch(module, 2)] == [
        b.value["id"].tolist() for b in found[0]
    ]


def test_a_rank_with_fewer_shards_gets_batches_without_rows(texts: Any) -> None:
    folder, _ = texts
    modules = open_shards(folder, ["id"], 3, train_batch_size=4)
    with VirtualShards(modules[1:2], 2) as rank:
        batches = list(itertools.islice(rank.train_chunks(), 6))
    assert [batch.rows > 0 for batch in batches] == [True, False] * 3


def test_a_small_buffer_holds_few_tables(texts: Any) -> None:
    """The buffer is smaller than the rows, whose tables are released and joined."""
    folder, tokens = texts
    (module,) = open_shards(
        folder, ["id", "tokens"], 1, train_batch_size=4, shuffle_buffer_size=400
    )
    found = [row for batch in epoch(module, 3) for row in batch.value[1]]
    assert sorted(row["id"] for row in found) == sorted(list(range(len(tokens))) * 3)
    for row in found:
        assert row["tokens"].tolist() == tokens[row["id"]]
    assert [row["id"] for row in found[:53]] != [row["id"] for row in found[53:106]]


def test_a_function_that_returns_no_batch_is_named(texts: Any) -> None:
    folder, _ = texts
    (module,) = open_shards(folder, ["id"], 1, collate=CollateFunction(None, lambda rows: None))
    with module, pytest.raises(DataError, match=r"collate_fn returned NoneType\. Return a tensor"):
        next(iter(module.train_chunks()))


def test_a_null_weight_is_an_error() -> None:
    rows = RowTable(pa.table({"x": [1.0, 2.0], "w": [1.0, None]}))
    collate = CollateFunction("w", lambda rows: torch.zeros(len(rows)))
    assert collate(rows[:1]).weights.tolist() == [1.0]
    with pytest.raises(DataError, match="Column 'w' holds nulls"):
        collate(rows)


def load_rows(folder: Path, *names: str) -> Any:
    """Return the rows of a folder's files as a collate function gets them, in stored order."""
    allowed = dict.fromkeys(names, "any")
    manifest = read_manifest(LocalStore(str(folder)), str(folder), None, names, allow_text=allowed)
    plan = plan_shards(manifest.train.row_groups, 1)
    with ArrowDataModule(
        train_dir=str(folder),
        val_dir=None,
        columns=(JoinedSpec(ROWS, "rows", "object", members=manifest.columns),),
        train_plan=plan,
        train_batch_size=manifest.train.rows,
        shuffle=False,
    ) as module:
        return next(module.train_data())[ROWS], manifest, plan


def test_numbers_have_the_type_that_holds_those_of_all_files(tmp_path: Path) -> None:
    types = [(pa.int32(), pa.float32()), (pa.int64(), pa.float64())]
    for number, (whole, real) in enumerate(types):
        columns = {
            "n": pa.array([2**30 if number == 0 else 2**40], whole),
            "r": pa.array([0.5 if number == 0 else 0.1], real),
            "l": pa.array([[0.5] if number == 0 else [0.1, 0.2]], pa.list_(real)),
        }
        parquet.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    rows, _, _ = load_rows(tmp_path, "n", "r", "l")
    assert rows.table.to_pylist() == [
        {"n": 2**30, "r": 0.5, "l": [0.5]},
        {"n": 2**40, "r": 0.1, "l": [0.1, 0.2]},
    ]


def test_timestamps_keep_dates_that_nanoseconds_cannot_hold(tmp_path: Path) -> None:
    moments = [datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31, 1, 2, 3, 4)]
    table = pa.table({"t": pa.array(moments, pa.timestamp("us"))})
    # As Spark writes by default.
    parquet.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    rows, _, _ = load_rows(tmp_path, "t")
    assert rows.table.to_pydict() == {"t": moments}


def repeated_numbers(rows: int) -> pa.Array:
    return pa.array([[0] * 999 + [row] for row in range(rows)], pa.list_(pa.int64()))


def small_numbers(rows: int) -> pa.Array:
    return pa.array([[row % 7] * 1000 for row in range(rows)], pa.list_(pa.uint8()))


def truth_values(rows: int) -> pa.Array:
    return pa.array([[row % 7 > 0] * 8000 for row in range(rows)], pa.list_(pa.bool_()))


def repeated_bytes(rows: int) -> pa.Array:
    return pa.array([bytes([row % 5]) * 8000 for row in range(rows)], pa.binary(8000))


def repeated_text(rows: int) -> pa.Array:
    return pa.array([None if row == 3 else str(row % 5) * 8000 for row in range(rows)])


@pytest.mark.parametrize("padding", [0, 100], ids=["small file", "large file"])
@pytest.mark.parametrize(
    "made", [repeated_numbers, small_numbers, truth_values, repeated_bytes, repeated_text]
)
def test_a_part_is_bounded_if_files_store_repeated_values_once(
    tmp_path: Path, made: Callable[[int], pa.Array], padding: int
) -> None:
    rows = 5000
    noise = np.random.default_rng(0).bytes(rows * padding)
    noises = [noise[row * padding : (row + 1) * padding] for row in range(rows)]
    table = pa.table({"v": made(rows), "noise": noises})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    names = ["v", "noise"]
    manifest = read_manifest(
        LocalStore(str(tmp_path)),
        str(tmp_path),
        None,
        names,
        allow_text=dict.fromkeys(names, "any"),
    )
    specs = (JoinedSpec(ROWS, "rows", "object", members=manifest.columns),)
    plan = plan_shards(manifest.train.row_groups, 1)
    files = RangeFiles(LocalStore(str(tmp_path)), specs)
    parts = [
        table_to_columns(part, specs)[ROWS].table
        for part, _ in read_tables(files, RangeRead(plan.shards[0][0]))
    ]
    assert pa.concat_tables(parts).equals(table)
    assert max(part.nbytes for part in parts) < 1.1 * PART_BYTES
    if made is not repeated_text:  # whose size footers do not tell
        assert plan.row_bytes == pytest.approx(table.nbytes / rows, rel=0.01)


def rows_of(folder: Path, table: pa.Table, **options: Any) -> Iterator[pa.Table]:
    """Write a table, and yield it as parts of rows of any length."""
    parquet.write_table(table, folder / "a.parquet", **options)
    names = table.column_names
    manifest = read_manifest(
        LocalStore(str(folder)), str(folder), None, names, allow_text=dict.fromkeys(names, "any")
    )
    specs = (JoinedSpec(ROWS, "rows", "object", members=manifest.columns),)
    (shard,) = plan_shards(manifest.train.row_groups, 1).shards
    for part, _ in read_tables(RangeFiles(LocalStore(str(folder)), specs), RangeRead(shard[0])):
        yield table_to_columns(part, specs)[ROWS].table


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "PLAIN"])
def test_text_of_each_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    table = pa.table({"v": [f"{row:05}" for row in range(1000)]})
    options = {"use_dictionary": False, "column_encoding": {"v": encoding}}
    assert pa.concat_tables(rows_of(tmp_path, table, **options)).equals(table)


@pytest.mark.parametrize(
    ("footer", "told"), [(5, "was replaced"), (0, "does not hold the planned rows")]
)
def test_text_of_a_file_with_fewer_row_groups_than_planned(
    tmp_path: Path, footer: int, told: str
) -> None:
    parquet.write_table(pa.table({"v": ["a", "b"]}), tmp_path / "a.parquet")
    files = RangeFiles(LocalStore(str(tmp_path)), [ColumnSpec("v", "text", "object")])
    read = RangeRead(RowRange(str(tmp_path / "a.parquet"), 3, 0, 2, footer))
    with pytest.raises(StoreError, match=told):
        list(read_tables(files, read))


def test_text_that_no_rows_share_is_not_kept(tmp_path: Path) -> None:
    rng, rows, length = np.random.default_rng(0), 30_000, 4000
    table = pa.table({"v": [rng.bytes(length) for _ in range(rows)]})
    before, most, found = pa.total_allocated_bytes(), 0, 0
    for part in rows_of(tmp_path, table):
        found += len(part)
        del part
        most = max(most, pa.total_allocated_bytes() - before)
    assert found == rows
    assert most < 4 * PART_BYTES < rows * length


def test_the_plan_counts_narrow_rows_in_full(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"v": np.random.default_rng(0).random(10_000)}), tmp_path / "a")
    manifest = read_manifest(
        LocalStore(str(tmp_path)), str(tmp_path), None, ["v"], allow_text={"v": "any"}
    )
    specs = (JoinedSpec(ROWS, "rows", "object", members=manifest.columns),)
    assert plan_shards(manifest.train.row_groups, 1).varying_bytes_of(specs) >= 8


def test_the_shuffle_buffer_is_bounded_if_the_first_rows_are_short(tmp_path: Path) -> None:
    """Files may be ordered by the length of their text."""
    count, length, parts = 100, 5000, 90
    texts = [
        [f"{row:06}" + "x" * (1 if n < 10 else length) for row in range(count)]
        for n in range(parts)
    ]
    for number, of_part in enumerate(texts):
        path = tmp_path / f"{number:02}.parquet"
        parquet.write_table(pa.table({"text": of_part}), path, use_dictionary=False)
    _, manifest, plan = load_rows(tmp_path, "text")
    mean = np.mean([len(text) for of_part in texts for text in of_part])
    assert mean < plan.row_bytes < 1.1 * mean
    buffer_bytes = 2**23
    assert order_warning(manifest.train.row_groups, plan, manifest.columns, buffer_bytes)
    read = []

    def columns() -> Iterator[dict[str, Any]]:
        for number, of_part in enumerate(texts):
            read.append(number)
            yield {"text": np.array(of_part, object)}

    rngs, sizes = [np.random.default_rng(0)], [10] * (parts * count // 10)
    next(stream_batches(columns(), sizes, rngs, None, buffer_bytes, plan.row_bytes))
    assert len(read) * count < 1.2 * buffer_bytes / mean


def test_the_shuffle_buffer_bounds_the_memory_of_tables() -> None:
    row, part, parts = 2**16, 64, 60

    def read() -> Iterator[dict[str, Any]]:
        for number in range(parts):
            content = [bytes([number]) * row] * part
            yield {ROWS: RowTable(pa.table({"x": pa.array(content, pa.large_binary())}))}

    before, most = pa.total_allocated_bytes(), 0
    buffer_bytes = 4 * part * row
    sizes = [16] * (part * parts // 16)
    found = 0
    for chunk in stream_batches(read(), sizes, [np.random.default_rng(0)], None, buffer_bytes, row):
        most = max(most, pa.total_allocated_bytes() - before)
        found += sum(len(batch[ROWS]) for batch in chunk.batches())
    assert found == part * parts
    # Less than half of a table may be unused. A chunk, its copy and a part come on top.
    assert most < 2 * buffer_bytes + 4 * part * row
    assert most < parts * part * row / 4
