"""Sweeping of temporary folders of killed processes, and only of those."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvd_estimators._util import temp_files
from hvd_estimators._util.temp_files import LocalFile, sweep

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
