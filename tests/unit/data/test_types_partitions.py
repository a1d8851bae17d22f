"""Partition columns, whose values are in the files' paths."""

from urllib.parse import quote

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from foreign import check, describe, load, read, write
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.types import partition_column, partition_spec, partition_values
from hvd_estimators.exceptions import ColumnError, DataError

pytestmark = pytest.mark.versions


def test_duckdb_pandas_and_polars_partitions_are_columns(tmp_path):
    frame = pd.DataFrame({"x": np.arange(12.0), "day": np.arange(12) % 3, "k": np.arange(12) / 4})
    roots = {name: tmp_path / name / "data" for name in ("duckdb", "pandas", "polars")}
    for root in roots.values():
        root.mkdir(parents=True)
    table = pa.Table.from_pandas(frame)
    connection = duckdb.connect()
    connection.register("frame", table)
    connection.execute(
        f"copy frame to '{roots['duckdb']}' (format parquet, partition_by (day, k), "
        "overwrite_or_ignore true)"
    )
    frame.to_parquet(roots["pandas"], partition_cols=["day", "k"])
    pl.from_pandas(frame).write_parquet(
        roots["polars"], use_pyarrow=True, pyarrow_options={"partition_cols": ["day", "k"]}
    )

    for root in roots.values():
        found = load(root, "k", "x", "day")
        order = np.argsort(found["x"])
        assert list(found) == ["k", "x", "day"]
        for name in found:
            check(found[name][order], frame[name].to_numpy())


def test_partitions_are_integers_only_if_all_values_are(folder, tmp_path):
    write(folder / "day=1" / "a.parquet", x=[1.0])
    write(folder / "day=-02" / "a.parquet", x=[2.0])
    validation = tmp_path / "validation"
    write(validation / "day=7" / "a.parquet", x=[3.0])

    found = describe(folder, "x", "day", validation=validation)
    assert found.columns[1] == ColumnSpec("day", "partition", "int64")
    check(read(found.train, found.columns)["day"], np.array([-2, 1]))
    check(read(found.validation, found.columns)["day"], np.array([7]))

    write(validation / "day=2.5e1" / "a.parquet", x=[4.0])
    found = describe(folder, "x", "day", validation=validation)
    assert found.columns[1] == ColumnSpec("day", "partition", "float64")
    check(read(found.train, found.columns)["day"], np.array([-2.0, 1.0]))
    check(read(found.validation, found.columns)["day"], np.array([25.0, 7.0]))


def test_names_and_values_of_partitions_are_decoded(folder):
    write(folder / "a%2Fb=%2D1%2E5" / "x.parquet", x=[1.0])

    check(load(folder, "a/b", "x")["a/b"], np.array([-1.5]))


def test_partition_columns_alone_have_the_files_rows(folder):
    write(folder / "k=1" / "x.parquet", x=[1.0, 2.0])
    write(folder / "k=2" / "x.parquet", x=[3.0])

    check(load(folder, "k")["k"], np.array([1, 1, 2]))


def test_columns_of_the_file_take_precedence_over_partitions(folder):
    write(folder / "k=1" / "x.parquet", k=[5.0])

    assert describe(folder, "k").columns == (ColumnSpec("k", "scalar", "float64"),)
    check(load(folder, "k")["k"], np.array([5.0]))


def test_parent_folders_are_not_partitions(tmp_path):
    write(tmp_path / "k=1" / "data" / "x.parquet", x=[5.0])

    with pytest.raises(ColumnError, match="no column 'k'; their columns are x "):
        describe(tmp_path / "k=1" / "data", "k")


def test_the_deepest_folder_wins_even_with_an_underscore(tmp_path):
    write(tmp_path / "_k=1" / "data" / "_k=2" / "x.parquet", x=[5.0])

    check(load(tmp_path / "_k=1" / "data", "_k")["_k"], np.array([2]))


def test_non_numeric_partitions_are_rejected(folder):
    write(folder / "day=1" / "x.parquet", x=[1.0])
    write(folder / "day=2024-01-01" / "x.parquet", x=[1.0])

    with pytest.raises(ColumnError, match=r"'day' is a partition with the value '2024-01-01'"):
        describe(folder, "day")
    for value in ("nan", "1_000", "", "٣", "true"):
        with pytest.raises(ColumnError, match="'day' is a partition with the value"):
            partition_spec("day", {"file": value})


def test_the_null_partition_is_an_error(folder):
    write(folder / "day=1" / "x.parquet", x=[1.0])
    write(folder / "day=__HIVE_DEFAULT_PARTITION__" / "x.parquet", x=[1.0])

    with pytest.raises(DataError, match=r"'day' is null in all rows of .*HIVE_DEFAULT"):
        describe(folder, "day")


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_partitions_that_are_columns_in_some_files_are_an_error(folder, order):
    outside, inside = order
    write(folder / outside / "day=1" / "x.parquet", x=[1.0])
    write(folder / inside / "x.parquet", x=[1.0], day=[1])
    with pytest.raises(ColumnError, match="'day'"):
        describe(folder, "day")


def test_files_outside_the_partitions_are_an_error(folder):
    write(folder / "day=1" / "x.parquet", x=[1.0])
    write(folder / "x.parquet", x=[1.0])

    with pytest.raises(ColumnError, match=r"data/x\.parquet' has no column 'day'.*'day=1/'"):
        describe(folder, "day")
    with pytest.raises(ColumnError, match="'' has no column 'day'"):
        table_to_columns(pa.table({"x": [1]}), [ColumnSpec("day", "partition", "int64")])


@settings(max_examples=50)
@given(
    st.lists(
        st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=9,
    ),
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: "=" not in name),
)
def test_numbers_survive_a_round_trip_through_paths(values, name):
    files = {f"/data/{quote(name, safe='')}={quote(str(v), safe='')}/f": v for v in values}

    spec = partition_spec(name, {file: partition_values(file)[name] for file in files})

    all_integers = all(isinstance(value, int) for value in values)
    assert spec.dtype == ("int64" if all_integers else "float64")
    for file, value in files.items():
        check(partition_column(spec, file, 3), np.full(3, value, spec.dtype))
