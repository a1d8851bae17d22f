"""Stores on a local path: prefixes, the layout below them, and atomic files."""

import pickle
import posixpath
from pathlib import Path

import pytest

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import LocalStore, RunPaths, Store


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "store"))


@pytest.mark.parametrize(
    ("prefix", "path"),
    [
        ("/data/experiments", "/data/experiments"),
        ("/data/experiments/", "/data/experiments"),
        ("file:///data/experiments", "/data/experiments"),
        ("file:/data/experiments", "/data/experiments"),
        ("file://localhost/data/experiments", "/data/experiments"),
        ("file:///data/my%20experiments", "/data/my experiments"),
        ("/data/a b", "/data/a b"),
        ("/data/a#b?c", "/data/a#b?c"),
        ("/data/100%25", "/data/100%25"),  # a path is taken as it is
    ],
)
def test_create_takes_local_paths_and_file_urls(prefix, path):
    store = Store.create(prefix)

    assert type(store) is LocalStore
    assert store.prefix_path == path


def test_a_relative_prefix_and_the_home_become_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    assert Store.create("experiments").prefix_path == str(tmp_path / "experiments")
    assert Store.create("~/experiments").prefix_path == "/home/somebody/experiments"


@pytest.mark.parametrize("prefix", ["dbfs:/a", "nothing://a"])
def test_create_refuses_a_prefix_that_no_store_serves(prefix):
    with pytest.raises(ParamError, match=f"found '{prefix}'"):
        Store.create(prefix)


def test_create_passes_its_keywords_on():
    store = Store.create("/data", checkpoint_filename="best", save_runs=False)

    assert store.get_checkpoint_filename() == "best"
    assert not store.saving_runs()


def test_everything_lies_under_the_prefix():
    store = Store.create("/data")

    assert store.get_train_data_path() == "/data/intermediate_train_data"
    assert store.get_train_data_path("7f") == "/data/intermediate_train_data.7f"
    assert store.get_val_data_path("7f") == "/data/intermediate_val_data.7f"
    assert store.get_test_data_path("7f") == "/data/intermediate_test_data.7f"
    assert store.get_runs_path() == "/data/runs"
    assert store.get_run_path("r1") == "/data/runs/r1"
    assert store.get_checkpoint_path("r1") == "/data/runs/r1/checkpoints"
    assert store.get_checkpoint_filename() == "checkpoint"
    assert store.get_logs_path("r1") == "/data/runs/r1/logs"
    assert store.run_paths("r1") == RunPaths(
        "r1", "/data/runs/r1", "/data/runs/r1/checkpoints", "/data/runs/r1/logs"
    )


def test_each_place_can_be_set(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    store = LocalStore(
        "/data",
        train_path="file:///elsewhere/my%20train",
        val_path="/elsewhere/val",
        test_path="test",
        runs_path="/runs",
        checkpoint_filename="last.pt",
    )

    assert store.get_train_data_path() == "/elsewhere/my train"
    assert store.get_val_data_path() == "/elsewhere/val"
    assert store.get_test_data_path() == str(tmp_path / "test")
    run = store.run_paths("r1")
    assert (run.checkpoints_path, run.checkpoint_filename) == ("/runs/r1/checkpoints", "last.pt")


def test_without_saved_runs_there_are_no_checkpoints_and_logs():
    paths = LocalStore("/data", save_runs=False).run_paths("r1")

    assert paths == RunPaths("r1", "/data/runs/r1", None, None)


@pytest.mark.parametrize("run_id", ["torch_2024-01-01", "a.b", "lr=0.1", "Größe"])
def test_usual_run_ids_are_accepted(run_id):
    assert LocalStore("/data").run_paths(run_id).run_path == f"/data/runs/{run_id}"


@pytest.mark.parametrize("run_id", ["", "a/b", "../other", "a b", "a\n", "..", "."])
def test_run_ids_that_leave_their_folder_are_refused(run_id):
    with pytest.raises(ParamError, match="run_id: expected letters"):
        LocalStore("/data").run_paths(run_id)


@pytest.mark.parametrize("name", ["plain", "with space", "a#b?c", "100%20", "[x]", "{y}*"])
def test_files_can_be_written_and_read_whatever_the_prefix_is_called(tmp_path, name):
    store = Store.create(str(tmp_path / name))

    store.check()
    file = tmp_path / name / "runs" / "r1" / "checkpoints" / "checkpoint"
    store.write_text(str(file), "größe")

    assert file.read_text(encoding="utf-8") == "größe"
    # As code for ``horovod.spark`` puts it together.
    joined = posixpath.join(store.get_checkpoint_path("r1"), store.get_checkpoint_filename())
    assert store.exists(joined)
    assert store.read(joined) == "größe".encode()
    assert store.spark_url(store.prefix_path) == f"file://{tmp_path}/{name}"


def test_a_file_appears_only_when_its_block_has_ended(store):
    target = Path(store.prefix_path) / "runs" / "model"

    with store.open_atomic(str(target)) as file:
        file.write(b"who")
        file.flush()
        assert not target.exists()
        file.write(b"le")

    assert target.read_bytes() == b"whole"
    assert list(target.parent.iterdir()) == [target]


def write_half(store, target, error):
    with store.open_atomic(str(target)) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_no_file(store, error):
    target = Path(store.prefix_path) / "model"

    with pytest.raises(error):
        write_half(store, target, error)

    assert list(target.parent.iterdir()) == []


def test_a_block_that_fails_keeps_the_file_that_was_there(store):
    target = Path(store.prefix_path) / "model"
    store.write_text(str(target), "old")

    with pytest.raises(KeyboardInterrupt):
        write_half(store, target, KeyboardInterrupt)

    assert target.read_text() == "old"
    assert list(target.parent.iterdir()) == [target]


def test_a_file_replaces_the_one_that_was_there(store):
    path = f"{store.prefix_path}/model"
    store.write_text(path, "a long old text")
    store.write_text(path, "new")

    assert store.read(path) == b"new"


def test_reading_a_missing_file_is_an_error_that_names_it(store):
    with pytest.raises(StoreError, match=r"holds no file '.*/absent'"):
        store.read(f"{store.prefix_path}/absent")


def test_checking_makes_the_prefix_and_leaves_nothing_in_it(store):
    store.check()

    assert list(Path(store.prefix_path).iterdir()) == []


@pytest.mark.parametrize("below", ["", "/below", "/below/it"])
def test_a_prefix_at_or_under_a_regular_file_is_an_error_that_names_it(tmp_path, below):
    (tmp_path / "file").write_text("")
    prefix = f"{tmp_path}/file{below}"

    with pytest.raises(StoreError, match=f"prefix_path='{prefix}'"):
        LocalStore(prefix).check()


def test_checkpoints_are_listed_in_the_order_in_which_they_were_written(store):
    folder = Path(store.get_run_path("r1")) / "checkpoints"
    of_estimators = [f"checkpoint-{name}" for name in ["000002", "000002-48", "000002-144"]]
    of_users = ["best-epoch=9", "best-epoch=10"]

    assert store.get_checkpoints("r1") == []
    for name in sorted([*of_estimators, *of_users]):
        store.write_text(str(folder / f"{name}.ckpt"), "")
    store.write_text(str(folder / "c.pt"), "")
    for name in of_estimators:
        store.write_text(str(folder / f"{name}.json"), "")
    # No pointer: it was never finished.
    store.write_text(str(folder / "checkpoint-000003.ckpt"), "")

    expected = [str(folder / f"{name}.ckpt") for name in [*of_users, *of_estimators]]
    assert store.get_checkpoints("r1") == expected
    assert store.get_checkpoints("r1", suffix=".pt") == [str(folder / "c.pt")]
    assert store.get_checkpoints("r2") == []


def test_files_and_folders_are_deleted_and_missing_ones_are_no_error(store):
    path = store.get_train_data_path("1")
    store.write_text(f"{path}/deep/file", "")

    store.delete(path)
    store.delete(path)

    assert not store.exists(path)


def test_a_store_goes_to_other_processes_by_pickling(store):
    store.write_text(f"{store.prefix_path}/file", "text")

    there = pickle.loads(pickle.dumps(store))

    assert there.run_paths("r1") == store.run_paths("r1")
    assert there.read(f"{store.prefix_path}/file") == b"text"
