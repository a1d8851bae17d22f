"""Manifests as documents."""

import json
import pickle

import pytest

from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest, RowGroup, Split

COLUMNS = (
    ColumnSpec("age", "scalar", "int32"),
    ColumnSpec("pixels", "array", "uint8", (28, 28, 3)),
    ColumnSpec("words", "sparse", "float32", (1000,)),
    ColumnSpec("day", "partition", "int64"),
    ColumnSpec("tags", "sparse", "float32", (5,), ("tags__indices_", "tags__values")),
)
TRAIN = Split("/data/train", (RowGroup("/data/train/a.parquet", 0, 10), RowGroup("/b", 3, 5)))
VALIDATION = Split("/data/val", (RowGroup("/data/val/ä ?#.parquet", 0, 2),))


@pytest.mark.parametrize("validation", [None, VALIDATION, Split("/data/empty", ())])
def test_manifests_survive_json_and_pickle(validation):
    manifest = DatasetManifest(COLUMNS, TRAIN, validation)

    assert DatasetManifest.from_json(manifest.to_json()) == manifest
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_the_document_is_plain_json():
    document = json.loads(DatasetManifest(COLUMNS, TRAIN).to_json())

    assert document["columns"][1] == {
        "name": "pixels",
        "kind": "array",
        "dtype": "uint8",
        "shape": [28, 28, 3],
        "stored": [],
    }
    assert document["train"]["row_groups"][1] == {
        "file": "/b",
        "index": 3,
        "rows": 5,
        "open_bytes": 0,
    }
    assert document["validation"] is None


def test_columns_know_their_width_and_stored_names():
    scalar, array, sparse, partition, renamed = COLUMNS

    assert [column.width for column in COLUMNS] == [1, 28 * 28 * 3, 1000, 1, 5]
    assert scalar.stored_names == ("age",)
    assert array.stored_names == ("pixels",)
    assert sparse.stored_names == ("words__indices", "words__values")
    assert partition.stored_names == ()
    assert renamed.stored_names == ("tags__indices_", "tags__values")


def test_splits_sum_their_rows_and_columns_are_found_by_name():
    manifest = DatasetManifest(COLUMNS, TRAIN)

    assert manifest.train.rows == 15
    assert manifest.column("words") is COLUMNS[2]
    with pytest.raises(KeyError, match="absent"):
        manifest.column("absent")


@pytest.mark.parametrize(
    ("spec", "row_bytes"),
    [
        (ColumnSpec("x", "scalar", "bool"), 1),
        (ColumnSpec("x", "vector", "float32", (64,)), 256),
        (ColumnSpec("x", "array", "int64", (2, 3)), 48),
        (ColumnSpec("x", "text", "object"), 8),
    ],
)
def test_the_size_of_a_row_is_the_size_of_its_elements(spec, row_bytes):
    assert spec.row_bytes == row_bytes
