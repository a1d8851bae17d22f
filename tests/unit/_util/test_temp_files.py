"""Sweeping of temporary folders of killed processes, and only of those."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvd_estimators._util import temp_files
from hvd_estimators._util.temp_files import LocalFile, folder_prefix, sweep

HOLDER = """
from hvd_estimators._util.temp_files import LocalFile
file = LocalFile()
open(file, "w").write("much")
print(file.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temp_files._sweep_once.cache_clear()


def test_the_folder_of_a_killed_process_is_swept_when_another_is_made(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    try:
        path = Path(process.stdout.readline().strip())
        own = LocalFile()
        Path(own).write_text("mine")
        # Its owner lives, and so does this process.
        sweep(str(tmp_path))
        assert path.read_text() == "much"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert path.exists()
    temp_files._sweep_once.cache_clear()
    another = LocalFile()
    assert not path.parent.exists()
    assert Path(own).read_text() == "mine"
    another.close()
    own.close()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_certainly_dead_processes_are_swept(tmp_path, monkeypatch):
    machine, pid, started = folder_prefix().removeprefix("hvd_estimators-of-").split("-")[:3]
    # A reused PID belongs to another process.
    swept = tmp_path / f"hvd_estimators-of-{machine}-{pid}-{int(started) + 1}-a1b2"
    target = tmp_path / "elsewhere"
    kept = [
        tmp_path / f"hvd_estimators-of-{machine}-{pid}-{started}-a1b2",
        tmp_path / f"hvd_estimators-of-{'0' * 16}-{pid}-{int(started) + 1}-a1b2",
        tmp_path / f"hvd_estimators-of-{machine}-{pid}-{int(started) + 1}-",
        tmp_path / "hvd_estimators-a1b2",
        target,
    ]
    for folder in (swept, *kept):
        folder.mkdir()
        (folder / "content").touch()
    link = tmp_path / f"hvd_estimators-of-{machine}-{pid}-{int(started) + 2}-a1b2"
    link.symlink_to(target)
    sweep(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([*kept, link])
    assert (target / "content").exists()

    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    swept.mkdir()
    sweep(str(tmp_path))
    assert swept.exists()
