"""Transformations of rows by users' functions, and rejected results."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pyarrow as pa
import pytest
from foreign import describe, write
from pyarrow import parquet

from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.loading import interleave
from hvd_estimators.loading import transform as transformation_module
from hvd_estimators.loading.interleave import one_per_group
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.loading.transform import EditedField, Transformation, Transformed, edited_fields

pytestmark = pytest.mark.versions

READERS: list[type] = [ArrowDataModule]
with contextlib.suppress(ImportError):
    from hvd_estimators.loading.petastorm import PetastormDataModule

    READERS.append(PetastormDataModule)
WORDS = np.array(["a", "bb", "ccc", "dd"], object)
COLUMNS = {"word": WORDS, "x": np.arange(4.0), "y": np.arange(4)}


def by_row(row):
    return {**row, "length": len(row["word"]), "pair": [row["x"], -row["x"]]}


def by_batch(columns):
    return {
        **columns,
        "length": np.array([len(word) for word in columns["word"]]),
        "pair": np.stack([columns["x"], -columns["x"]], axis=1),
    }


@pytest.mark.parametrize("form", [{"row_function": by_row}, {"batch_function": by_batch}])
def test_row_and_batch_functions_are_equivalent(form):
    transformation = Transformation(
        **form,
        edited=(EditedField("length", "float32", ()), EditedField("pair", "float32", (None,))),
        removed=("y",),
        needed=("length", "pair"),
    )

    columns = transformation(COLUMNS)

    # Text that is not needed is dropped.
    assert set(columns) == {"x", "length", "pair"}
    assert columns["length"].dtype == columns["pair"].dtype == np.float32
    np.testing.assert_array_equal(columns["length"], [1, 2, 3, 2])
    np.testing.assert_array_equal(columns["pair"], [[0, 0], [1, -1], [2, -2], [3, -3]])


@pytest.mark.parametrize(
    ("transformation", "message"),
    [
        (Transformation(lambda row: None), "transformation_fn returned NoneType. Return a dict"),
        (Transformation(batch_function=lambda c: [1]), "transformation_batch_fn returned list"),
        (Transformation(batch_function=lambda c: {"x": c["x"][:3]}), r"\(3,\) for 'x' of 4 rows"),
        (Transformation(batch_function=lambda c: {"x": 1.0}), r"\(\) for 'x' of 4 rows"),
        (Transformation(lambda r: {"x": [1] * r["y"]}), r"shapes \(0,\) and \(1,\) for 'x'"),
        (Transformation(lambda r: dict.fromkeys("xyz"[: r["y"] + 1], 1)), "fields for some rows"),
        (Transformation(lambda row: {"x": 1}, needed=("y",)), "no field 'y'; its fields are x"),
        (Transformation(lambda row: row, removed=("y",), needed=("y",)), "no field 'y'"),
        (Transformation(lambda row: row, needed=("word",)), "'word' is str.* Make numbers"),
        (
            Transformation(by_row, edited=(EditedField("pair", "float32", (3,)),)),
            r"'pair' has rows of shape \(2,\) .* says \(3,\)",
        ),
        (Transformation(by_row, edited=(EditedField("z", "int64", None),)), "no field 'z'"),
    ],
)
def test_invalid_results_are_rejected(transformation, message):
    with pytest.raises(DataError, match=message):
        transformation(COLUMNS)


@pytest.mark.parametrize("values", [["a\0", "\0", "b"], [b"a\0\0", b"", b"b"]])
def test_text_keeps_null_bytes_at_its_end(values):
    columns = {"x": np.arange(3)}
    options = {"needed": ("text", "pair"), "text": ("text", "pair")}

    def by_row(row):
        return {"text": values[row["x"]], "pair": [values[row["x"]]] * 2}

    def by_batch(columns):
        return {"text": values, "pair": [[value] * 2 for value in values]}

    for function in ({"row_function": by_row}, {"batch_function": by_batch}):
        made = Transformation(**function, **options)(columns)
        assert made["text"].tolist() == values
        assert made["pair"].tolist() == [[value, value] for value in values]


def test_edited_fields_may_be_tuples_of_more_than_three_entries():
    fields = edited_fields([("a", np.float32, (None, 3), False), ("b", "int64", None)])

    assert fields == (EditedField("a", "float32", (None, 3)), EditedField("b", "int64", None))
    assert edited_fields(None) == ()
    for bad in ["a", ("a",), ("a", "no type", ()), ("a", "int64", 3)]:
        with pytest.raises(ParamError, match="transformation_edit_fields: expected entries"):
            edited_fields([bad])


def test_growing_rows_are_transformed_in_small_parts():
    rows, grown = 1000, 8 * 500
    columns = {"x": np.arange(rows, dtype=np.float64)}

    def grow(columns):
        return {"x": np.repeat(columns["x"], 500).reshape(-1, 500)}

    transformation = Transformation(batch_function=grow)

    parts = list(Transformed(transformation).parts(columns, 100 * grown))

    assert [len(part["x"]) for part in parts] == [32, *[100] * 9, 68]
    np.testing.assert_array_equal(np.concatenate([p["x"][:, 0] for p in parts]), columns["x"])


@pytest.mark.parametrize("module", READERS)
def test_strings_and_bytes_are_read_as_text_if_allowed(tmp_path, monkeypatch, module):
    path = tmp_path / "data" / "a.parquet"
    columns = {
        "s": ["one", "two", "three"],
        "d": pa.array(["x", "y", "x"]).dictionary_encode(),
        "b": pa.array([b"1", b"22", b""]),
        "fixed": pa.array([b"ab", b"cd", b"ef"], pa.binary(2)),
    }
    write(path, **columns)

    with pytest.raises(ColumnError, match="'s' has type string"):
        describe(path.parent, "s")
    manifest = describe(path.parent, *columns, allow_text=True)
    assert [spec.kind for spec in manifest.columns] == ["text", "text", "text", "array"]

    # The size of text counts, because parts are bounded by bytes.
    monkeypatch.setattr(interleave, "PART_BYTES", 100)
    plan = plan_shards(manifest.train.row_groups, 1)
    options = {"train_dir": manifest.train.path, "val_dir": None, "columns": manifest.columns}
    with (
        module(train_plan=plan, **options) as data,
        contextlib.closing(data.read(iter([one_per_group(plan.shards[0])]), 1)) as parts,
    ):
        found = list(parts)
    assert len(found) > 1
    expected = {
        **columns,
        "d": ["x", "y", "x"],
        "b": [b"1", b"22", b""],
        "fixed": [[97, 98], [99, 100], [101, 102]],
    }
    assert {name: [row for part in found for row in part[name].tolist()] for name in expected} == (
        expected
    )


@pytest.mark.parametrize("module", READERS)
@pytest.mark.parametrize("encoding", ["dictionary", "plain"])
def test_parts_of_text_are_bounded_by_decoded_size(tmp_path, monkeypatch, module, encoding):
    """A value shared by many rows may be small in the file."""
    path, size = tmp_path / "data" / "a.parquet", 1000
    words = [f"{i:04}" * (size // 4) for i in range(10)]
    text = pa.array([words[i % 10] for i in range(3000)])
    path.parent.mkdir()
    table = pa.table({"text": text, "id": np.arange(3000)})
    parquet.write_table(table, path, use_dictionary=encoding == "dictionary")
    manifest = describe(path.parent, "text", "id", allow_text=True)
    plan = plan_shards(manifest.train.row_groups, 1)
    most = 100 * size
    monkeypatch.setattr(interleave, "PART_BYTES", most)
    options = {"train_dir": manifest.train.path, "val_dir": None, "columns": manifest.columns}

    with (
        module(train_plan=plan, **options) as data,
        contextlib.closing(data.read(iter([one_per_group(plan.shards[0])]), 1)) as parts,
    ):
        found = list(parts)

    assert [row for part in found for row in part["text"]] == text.to_pylist()
    assert np.concatenate([part["id"] for part in found]).tolist() == list(range(3000))
    sizes = [sum(map(len, part["text"])) for part in found]
    assert max(sizes) <= most + size
    # The parts are not needlessly small.
    assert len(sizes) <= 40


def test_null_text_is_rejected_even_in_a_dictionary():
    values = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))

    with pytest.raises(DataError, match="'s' holds 1 nulls"):
        table_to_columns(pa.table({"s": values}), [ColumnSpec("s", "text", "object")])
    # A null without a row does not matter.
    found = table_to_columns(pa.table({"s": values.slice(2)}), [ColumnSpec("s", "text", "object")])
    assert found["s"].tolist() == ["a"]


def read_with(folder, transformation):
    """Read numbers 0 to 99 for one rank, in stored order, a few rows at a time."""
    write(folder / "a.parquet", x=np.arange(100))
    manifest = describe(folder, "x")
    with ArrowDataModule(
        train_dir=manifest.train.path,
        val_dir=None,
        columns=manifest.columns,
        train_plan=plan_shards(manifest.train.row_groups, 1),
        train_batch_size=10,
        shuffle=False,
        transformation=transformation,
    ) as module:
        return [batch["x"] for batch in itertools.islice(module.train_data(), 10)]


def at_70(value, other):
    """Return another value from row 70 on, by row and by batch."""
    return [
        Transformation(lambda row: {"x": other if row["x"] >= 70 else value}),
        Transformation(
            batch_function=lambda columns: {
                "x": np.array([other if columns["x"].max() >= 70 else value] * len(columns["x"]))
            }
        ),
    ]


@pytest.mark.parametrize(
    ("transformation", "message"),
    [
        *((t, r"int64 of shape \(\) for 'x' .* and float64 of shape") for t in at_70(1, 2.5)),
        *((t, r"\(2,\) for 'x' .* and int64 of shape \(3,\)") for t in at_70([1, 2], [1, 2, 3])),
    ],
)
def test_errors_about_fields_that_change_name_the_rows(
    tmp_path, monkeypatch, transformation, message
):
    # A part holds rows 32 to 69 and others.
    monkeypatch.setattr(interleave, "PART_BYTES", 35 * 8)
    monkeypatch.setattr(transformation_module, "FIRST_ROWS", 35)
    with pytest.raises(DataError, match=message + r".* in rows 70 to \d+ .*'x': .*70.*edit_fields"):
        read_with(tmp_path, transformation)


def test_declared_types_make_fields_uniform(tmp_path):
    (by_row, _) = at_70(1, 2.5)
    edited = dataclasses.replace(by_row, edited=(EditedField("x", "float32", ()),))
    found = read_with(tmp_path, edited)
    assert {array.dtype.name for array in found} == {"float32"}
    assert np.concatenate(found).tolist() == [1.0] * 70 + [2.5] * 30


@pytest.mark.parametrize("new", [{"y": 1, "x": 2}, {"y": 1}, {}])
def test_errors_name_fields_that_differ_between_rows(tmp_path, new):
    def function(row):
        return new if row["x"] == 40 else {"x": row["x"]}

    lack = "lack 'x'" if "x" not in new else ""
    besides = "have 'y' besides" if "y" in new else ""
    wanted = " and ".join(filter(None, [lack, besides]))
    with pytest.raises(
        DataError, match=rf"other fields.*'x': .*40.*\}}, {wanted} \(text .*Return the same"
    ):
        read_with(tmp_path, Transformation(function))


def test_errors_name_fields_that_are_numbers_only_in_some_parts(tmp_path):
    def function(columns):
        late = columns["x"].max() > 40
        return {"x": columns["x"], "y": columns["x"].astype(str if late else int)}

    with pytest.raises(DataError, match=r"transformation_batch_fn .* rows 32 to 99 .* lack 'y'"):
        read_with(tmp_path, Transformation(batch_function=function))
