"""Per-rank temporary folders, deleted with the rank however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from json_values import NO_JSON, Effort, damaged_bytes, edited_anywhere, efforts, fuzz

from hvd_estimators._util.process_identity import this_process
from hvd_estimators.launch.rank import directory as rank_folder
from hvd_estimators.launch.rank.directory import make_rank_folder, sweep, use_own_temporary_folder
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE
from hvd_estimators.launch.rank.guardian import PID_FILE
from hvd_estimators.launch.rank.process import RankProcess, pickle_call

LEAVES = (
    "from hvd_estimators.launch.rank.directory import make_rank_folder; print(make_rank_folder())"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Shorter than pytest's path, which would be too long for sockets.
    made = Path(tempfile.mkdtemp(prefix="rf-", dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(made))
    monkeypatch.setenv("TMPDIR", str(made))
    rank_folder._sweep_once.cache_clear()
    yield made  # type: ignore[misc]
    rank_folder._sweep_once.cache_clear()
    subprocess.run(["rm", "-rf", str(made)], check=True)


def leave_files() -> None:
    use_own_temporary_folder()
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"generated")
    child = "import tempfile; tempfile.mkstemp()"
    subprocess.run([sys.executable, "-c", child], check=True)
    print(len(os.listdir(tempfile.gettempdir())), tempfile.gettempdir(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_temporary_files_of_a_killed_rank_are_deleted(folder: Path) -> None:
    lines: list[str] = []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    call = pickle_call(leave_files, (), {})
    with RankProcess(0, "here", call, env, lambda stream, given: lines.extend(given)) as rank:
        outcome = rank.outcome()
        assert outcome.error_type == "killed"
    number, _, used = lines[-1].strip().partition(" ")
    assert number == "2"
    assert Path(used).parent.parent == folder
    assert not list(folder.iterdir())


def test_only_folders_of_dead_processes_are_swept(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def left() -> Path:
        found = subprocess.run([sys.executable, "-c", LEAVES], env=env, check=True, stdout=-1)
        return Path(found.stdout.decode().strip())

    gone, running = left(), left()
    # The second process has swept the folder of the first.
    assert not gone.exists()
    # Its parent was killed, but the rank is still saving.
    Path(running, PID_FILE).write_text(str(os.getpid()))
    own = Path(make_rank_folder())
    unknown, damaged = folder / "hvd-estimators-rank-old", folder / "hvd-estimators-rank-bad"
    for path in (unknown, damaged):
        path.mkdir()
    (damaged / "owner.json").write_text("{")
    link = folder / "hvd-estimators-rank-link"
    link.symlink_to(own)
    sweep(str(folder))
    assert {running, own, unknown, damaged, link} == set(folder.iterdir())
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    Path(running, PID_FILE).write_text(ended.stdout.decode())
    sweep(str(folder))
    assert not running.exists()
    assert own.exists()


def test_directories_set_by_the_user_are_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used() -> Any:
        use_own_temporary_folder()
        return tempfile.gettempdir(), os.environ["TMPDIR"]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    assert used() == (str(folder), str(folder))
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "hvd-estimators-rank-1"))
    assert used() == (str(folder), str(folder))
    own = make_rank_folder()
    monkeypatch.setenv(DIRECTORY_VARIABLE, own)
    assert used() == (f"{own}/tmp", f"{own}/tmp")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


OWNER = {**vars(this_process())}


@pytest.mark.parametrize("effort", efforts(100))
def test_folders_with_damaged_owners_are_kept_and_do_not_stop_a_sweep(
    effort: Effort, folder: Path
) -> None:
    dead = {**OWNER, "pid": 2**22 + 1}
    text = json.dumps(dead).encode()
    edited = edited_anywhere(dead).map(lambda found: json.dumps(found).encode())

    def check(content: bytes) -> None:
        damaged, abandoned = (folder / f"hvd-estimators-rank-{name}" for name in ("a", "b"))
        for path, owner in ((damaged, content), (abandoned, text)):
            path.mkdir(exist_ok=True)
            (path / "owner.json").write_bytes(owner)
        sweep(str(folder))
        assert not abandoned.exists()
        sweep(str(folder))

    fuzz(check, edited | damaged_bytes(text) | st.sampled_from(NO_JSON), effort)
