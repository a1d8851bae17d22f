"""Local directories that are synchronized with a store."""

import os
import shutil
import threading
from pathlib import Path

import fsspec
import pytest

from hvd_estimators.store import FilesystemStore
from hvd_estimators.store.synced_directory import SyncedDirectory


@pytest.fixture
def store(tmp_path):
    root = f"memory://{tmp_path}"
    yield FilesystemStore(root)
    fs = fsspec.filesystem("memory")
    if fs.exists(root):
        fs.rm(root, recursive=True)


def logs(store):
    return store.run_paths("r1").logs_path


def contents(store):
    path = logs(store)
    return {file.removeprefix(f"{path}/"): store.read(file) for file in store.find(path)}


def uploaded(directory):
    directory._upload.result(10)


def test_files_are_uploaded_at_each_sync_and_at_the_end(store):
    with SyncedDirectory(store, logs(store)) as directory:
        folder = Path(directory.path)
        assert folder.is_dir()
        (folder / "train").mkdir()
        (folder / "train" / "events#1?").write_bytes(b"one")
        directory.sync()
        uploaded(directory)
        assert contents(store) == {"train/events#1?": b"one"}
        with open(folder / "train" / "events#1?", "ab") as file:
            file.write(b", two")
        directory.sync()
        uploaded(directory)
        assert contents(store) == {"train/events#1?": b"one, two"}
        (folder / "last").write_bytes(b"")
    assert contents(store) == {"train/events#1?": b"one, two", "last": b""}
    assert not folder.exists()


@pytest.mark.parametrize("is_whole_folder", [False, True])
def test_a_host_that_cleans_its_temporary_folders_deletes_nothing_in_the_store(
    store, is_whole_folder
):
    with SyncedDirectory(store, logs(store)) as directory:
        Path(directory.path, "events").write_text("of the first fit")
    with SyncedDirectory(store, logs(store)) as directory:
        Path(directory.path, "passin?").write_text("of this fit")
        directory.sync()
        uploaded(directory)
        if is_whole_folder:
            shutil.rmtree(directory.path)
        else:
            for name in ("events", "passin?"):
                Path(directory.path, name).unlink()
        directory.sync()
        uploaded(directory)
    assert contents(store) == {"events": b"of the first fit", "passin?": b"of this fit"}


def test_resumed_runs_have_the_earlier_files(store):
    with SyncedDirectory(store, logs(store)) as directory:
        Path(directory.path, "metrics.csv").write_text("1\n")
    with (
        SyncedDirectory(store, logs(store)) as directory,
        SyncedDirectory(store, logs(store), fetch=False) as other,
    ):
        with open(Path(directory.path, "metrics.csv"), "a") as file:
            file.write("2\n")
        # Another rank adds its files to the existing ones.
        assert os.listdir(other.path) == []
        Path(other.path, "profile-1").write_text("")
    assert contents(store) == {"metrics.csv": b"1\n2\n", "profile-1": b""}


def test_a_temporarily_unavailable_store_costs_a_warning(store, monkeypatch, caplog):
    with SyncedDirectory(store, logs(store)) as directory:
        Path(directory.path, "events").write_text("one")
        with monkeypatch.context() as patch:
            patch.setattr(FilesystemStore, "open_atomic", lambda s, path: 1 / 0)
            directory.sync()
            uploaded(directory)
        assert contents(store) == {}
        directory.sync()
        uploaded(directory)
        assert contents(store) == {"events": b"one"}
    (record,) = caplog.records
    assert "could not be written to memory://" in record.message
    assert "ZeroDivisionError" in record.message


def test_uploads_run_one_at_a_time_without_blocking_training(store, monkeypatch):
    go_on, running = threading.Event(), []
    real = FilesystemStore.open_atomic

    def slow(self, path):
        running.append(path)
        assert go_on.wait(10)
        return real(self, path)

    monkeypatch.setattr(FilesystemStore, "open_atomic", slow)
    with SyncedDirectory(store, logs(store)) as directory:
        Path(directory.path, "events").write_text("one")
        directory.sync()
        first = directory._upload
        Path(directory.path, "later").write_text("two")
        directory.sync()
        assert directory._upload is first
        assert not first.done()
        go_on.set()
    assert contents(store) == {"events": b"one", "later": b"two"}


def test_files_that_cannot_be_uploaded_stay_in_the_named_folder(store, monkeypatch, caplog):
    with SyncedDirectory(store, logs(store)) as directory:
        Path(directory.path, "events").write_text("one")
        monkeypatch.setattr(FilesystemStore, "open_atomic", lambda s, path: 1 / 0)
    assert Path(directory.path, "events").read_text() == "one"
    assert f"They stay in {directory.path!r} on " in caplog.text
    shutil.rmtree(directory.path)


def test_mlflow_metadata_names_the_path_in_the_store(store):
    with SyncedDirectory(store, logs(store)) as directory:
        text = f"a: file:{directory.path}/x\nb: file://{directory.path}/y\nc: {directory.path}\n"
        Path(directory.path, "mlruns").mkdir()
        Path(directory.path, "mlruns", "meta.yaml").write_text(text)
        Path(directory.path, "other.yaml").write_text(text)
    target = logs(store)
    assert contents(store) == {
        "mlruns/meta.yaml": f"a: {target}/x\nb: {target}/y\nc: {target}\n".encode(),
        "other.yaml": text.encode(),
    }
    with SyncedDirectory(store, logs(store)) as directory:
        found = Path(directory.path, "mlruns", "meta.yaml").read_text()
        assert found.startswith(f"a: file:{directory.path}/x\nb: file:{directory.path}/y\n")
    assert contents(store)["mlruns/meta.yaml"].startswith(f"a: {target}/x\n".encode())


@pytest.mark.parametrize("writer", ["", "-7164-140485310006976"])
def test_files_that_an_earlier_process_did_not_finish_are_deleted(store, writer):
    path = logs(store)
    for name in ("train/events", f".events-{'0a' * 16}{writer}", f"train/.x-{'0a' * 16}{writer}"):
        with store.open_atomic(f"{path}/{name}") as file:
            file.write(b"one")

    with SyncedDirectory(store, path) as directory:
        files = [file for _, _, names in os.walk(directory.path) for file in names]

    assert files == ["events"]
    assert contents(store) == {"train/events": b"one"}
