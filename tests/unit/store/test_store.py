"""Stores on a local path: prefixes, the layout below them, and atomic files."""

import errno
import os
import posixpath
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store import LocalStore, RunPaths, Store, retries
from hvd_estimators.store.files import Files, ListedFile


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "store"))


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_an_error_does_not_count_as_missing(store, monkeypatch, error):
    path = store.get_train_data_path()
    assert not store.exists(path)
    real = os.stat

    def fails(given, *args, **kwargs):
        if str(given) == path:
            raise error(errno.ESTALE if error is OSError else errno.EACCES, "on purpose", path)
        return real(given, *args, **kwargs)

    monkeypatch.setattr(os, "stat", fails)
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0)
    with pytest.raises(StoreError, match=r"looking for .*on purpose"):
        store.exists(path)


@pytest.mark.parametrize(
    ("prefix", "path"),
    [
        ("/data/experiments", "/data/experiments"),
        ("/data/experiments/", "/data/experiments"),
        ("file:///data/experiments", "/data/experiments"),
        ("file:/data/experiments", "/data/experiments"),
        ("file://localhost/data/experiments", "/data/experiments"),
        ("file:///data/my%20experiments", "/data/my experiments"),
        ("file:///data/run#1?", "/data/run#1?"),
        ("file:/data/run%231#2", "/data/run#1#2"),
        ("/data/a b", "/data/a b"),
        ("/data/a#b?c", "/data/a#b?c"),
        ("/data/100%25", "/data/100%25"),  # a path is not decoded
    ],
)
def test_create_accepts_local_paths_and_file_urls(prefix, path):
    store = Store.create(prefix)

    assert type(store) is LocalStore
    assert store.prefix_path == path


def test_relative_and_home_prefixes_become_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    assert Store.create("experiments").prefix_path == str(tmp_path / "experiments")
    assert Store.create("~/experiments").prefix_path == "/home/somebody/experiments"


def test_all_paths_are_below_the_prefix():
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


def test_each_path_can_be_set(monkeypatch, tmp_path):
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
def test_common_run_ids_are_accepted(run_id):
    assert LocalStore("/data").run_paths(run_id).run_path == f"/data/runs/{run_id}"


@pytest.mark.parametrize("name", ["plain", "with space", "a#b?c", "100%20", "[x]", "{y}*"])
def test_files_can_be_written_and_read_under_any_prefix(tmp_path, name):
    store = Store.create(str(tmp_path / name))

    store.check()
    file = tmp_path / name / "runs" / "r1" / "checkpoints" / "checkpoint"
    store.write_text(str(file), "größe")

    assert file.read_text(encoding="utf-8") == "größe"
    # As code for ``horovod.spark`` builds it.
    joined = posixpath.join(store.get_checkpoint_path("r1"), store.get_checkpoint_filename())
    assert store.exists(joined)
    assert store.read(joined) == "größe".encode()
    assert store.spark_url(store.prefix_path) == f"file://{tmp_path}/{name}"


def test_files_appear_only_at_the_end_of_their_block(store):
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
def test_failed_writes_leave_no_file(store, error):
    target = Path(store.prefix_path) / "model"

    with pytest.raises(error):
        write_half(store, target, error)

    assert list(target.parent.iterdir()) == []


def test_check_creates_the_prefix_and_leaves_it_empty(store):
    store.check()

    assert list(Path(store.prefix_path).iterdir()) == []


@pytest.mark.parametrize("below", ["", "/below", "/below/it"])
def test_a_prefix_at_or_under_a_file_is_rejected(tmp_path, below):
    (tmp_path / "file").write_text("")
    prefix = f"{tmp_path}/file{below}"

    with pytest.raises(StoreError, match=f"prefix_path='{prefix}'"):
        LocalStore(prefix).check()


def test_checkpoints_are_listed_in_the_order_of_writing(store):
    folder = Path(store.get_run_path("r1")) / "checkpoints"
    of_estimators = [f"checkpoint-{name}" for name in ["000002", "000002-48", "000002-144"]]
    of_users = ["best-epoch=9", "best-epoch=10"]

    assert store.get_checkpoints("r1") == []
    for name in sorted([*of_estimators, *of_users]):
        store.write_text(str(folder / f"{name}.ckpt"), "")
    store.write_text(str(folder / "c.pt"), "")
    for name in of_estimators:
        store.write_text(str(folder / f"{name}.json"), "")
    # An unfinished checkpoint: it has no manifest.
    store.write_text(str(folder / "checkpoint-000003.ckpt"), "")

    expected = [str(folder / f"{name}.ckpt") for name in [*of_users, *of_estimators]]
    assert store.get_checkpoints("r1") == expected
    assert store.get_checkpoints("r1", suffix=".pt") == [str(folder / "c.pt")]
    assert store.get_checkpoints("r2") == []


def test_delete_removes_files_and_folders_and_ignores_missing_ones(store):
    path = store.get_train_data_path("1")
    store.write_text(f"{path}/deep/file", "")

    store.delete(path)
    store.delete(path)

    assert not store.exists(path)


def test_local_folders_are_listed_as_fsspec_lists_them(store, tmp_path):
    root = Path(store.prefix_path)
    for name in ("b/c d/#e?.x", "b/.hidden", "_a", "z"):
        store.write_text(f"{root}/{name}", name)
    (root / "empty").mkdir()
    (root / "link").symlink_to(root / "z")
    (root / "linked folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")

    found = store.list_files(str(root))

    expected = sorted(Files._list_files(store, str(root)))
    assert [file[:2] for file in found] == [file[:2] for file in expected]
    assert [Path(file.path) for file in found] == sorted(
        path for path in root.rglob("*") if path.is_symlink() or not path.is_dir()
    )
    irregular = [Path(file.path).name for file in found if not file.is_regular]
    assert irregular == ["linked folder", "pipe"]
    (file,) = [file for file in found if file.path == f"{root}/z"]
    assert store.list_files(f"{root}/z") == [file]
    assert file == ListedFile(f"{root}/z")
    assert store.list_files(f"{root}/absent") == store.list_files(f"{root}/z/below") == []


@pytest.mark.parametrize(
    "ranges", [[(0, None)], [(-3, None), (2, 4)], [(5, 99), (-99, 3)], [(99, None), (4, 4)]]
)
def test_ranges_of_a_local_file_are_those_of_its_content(store, ranges):
    path = f"{store.prefix_path}/a"
    store.write_text(path, "0123456789")
    assert store.read_ranges(path, ranges) == [b"0123456789"[slice(*each)] for each in ranges]
    with pytest.raises(FileNotFoundError):
        store.read_ranges(f"{path}.absent", ranges)


def test_several_threads_delete_one_folder(tmp_path):
    """A walk through a folder fails if another thread deletes its entries meanwhile."""
    store = LocalStore(str(tmp_path / "store"))
    for number in range(5):
        folder = Path(store.folder) / str(number)
        for inner in range(30):
            (folder / str(inner)).mkdir(parents=True)
            (folder / str(inner) / "file").write_text("text")
        aligned = threading.Barrier(8)

        def delete(folder=folder, aligned=aligned):
            aligned.wait()
            store.delete(str(folder))

        with ThreadPoolExecutor(8) as threads:
            for future in [threads.submit(delete) for _ in range(8)]:
                future.result()
        assert not folder.exists()
