"""Processes are identified by what the system says about them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_estimators._util.process_identity import pid_exists, process_stat, this_process

RENAMED = """
import pathlib
pathlib.Path("/proc/self/comm").write_text("a) R 1 (b")
print("renamed", flush=True)
input()
"""


def test_a_processs_name_may_contain_anything():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", RENAMED], stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline()
        stat = process_stat(process.pid)
        process.stdin.close()
    assert (stat.name, stat.parent) == ("a) R 1 (b", os.getpid())
    assert stat.state in "RS"
    assert int(stat.started) >= int(this_process().started)


def test_a_process_that_has_ended_has_no_state():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not pid_exists(process.pid)
    with pytest.raises(FileNotFoundError):
        process_stat(process.pid)


def test_another_users_process_exists_too(monkeypatch):
    assert pid_exists(os.getpid())

    def kill(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert pid_exists(1)
    assert Path("/proc/1").exists()
