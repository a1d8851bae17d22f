"""Manifests as documents."""

import json
import pickle
from typing import Any

import pytest
from json_values import Effort, edited_anywhere, efforts, fuzz

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


def test_documents_of_earlier_versions_lack_checksums_of_footers():
    group = RowGroup("/a", 0, 10, 400, 123)
    written = DatasetManifest(COLUMNS, Split("/", (group,)))
    assert DatasetManifest.from_json(written.to_json()) == written
    document = json.loads(written.to_json())
    del document["train"]["row_groups"][0]["footer"]
    (found,) = DatasetManifest.from_json(json.dumps(document)).train.row_groups
    assert found == RowGroup("/a", 0, 10, 400)


DOCUMENT = json.loads(DatasetManifest(COLUMNS, TRAIN, VALIDATION).to_json())


@pytest.mark.parametrize("effort", efforts(300))
def test_an_edited_manifest_is_an_error_or_describes_a_dataset(effort: Effort) -> None:
    def check(document: Any) -> None:
        try:
            manifest = DatasetManifest.from_json(json.dumps(document))
        except ValueError:
            return
        assert DatasetManifest.from_json(manifest.to_json()) == manifest
        names = [column.name for column in manifest.columns]
        assert len(set(names)) == len(names)
        for split in filter(None, (manifest.train, manifest.validation)):
            places = {(group.file, group.index) for group in split.row_groups}
            assert len(places) == len(split.row_groups)
            assert all(group.rows >= 1 and group.index >= 0 for group in split.row_groups)
            assert split.rows == sum(range_of.rows for range_of in split.row_groups)

    fuzz(check, edited_anywhere(DOCUMENT), effort)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["train"]["row_groups"].append(d["train"]["row_groups"][0]), "listed twice"),
        (lambda d: d["train"]["row_groups"][0].update(rows=2.5), "impossible row group"),
        (lambda d: d["train"]["row_groups"][0].update(index=-1), "impossible row group"),
        (lambda d: d["columns"].append(d["columns"][0]), "columns are listed twice"),
        (lambda d: d["columns"][0].update(kind="tensor"), "impossible column"),
        (lambda d: d["columns"][0].update(dtype="float33"), "float33"),
        (lambda d: d["columns"][1].update(shape="28"), "impossible column"),
        (lambda d: d.pop("train"), "KeyError: 'train'"),
    ],
)
def test_errors_name_the_edited_value(edit, message):
    document = json.loads(DatasetManifest(COLUMNS, TRAIN).to_json())
    edit(document)

    with pytest.raises(ValueError, match=message):
        DatasetManifest.from_json(json.dumps(document))
