"""Identification of processes by the system's data about them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from other_systems import BOOT, like_macos
from processes import wait_until

from hvd_estimators._util import process_identity
from hvd_estimators._util.process_identity import pid_exists, process_stat, this_process

RENAMED = """
import pathlib
pathlib.Path("/proc/self/comm").write_text("a) R 1 (b")
print("renamed", flush=True)
input()
"""


def test_a_process_name_may_contain_any_characters():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", RENAMED], stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline()
        stat = process_stat(process.pid)
        process.stdin.close()
    assert (stat.name, stat.parent) == ("a) R 1 (b", os.getpid())
    assert stat.state in "RS"
    assert int(stat.started) >= int(this_process().started)


def test_an_ended_process_has_no_state():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not pid_exists(process.pid)
    with pytest.raises(FileNotFoundError):
        process_stat(process.pid)


def test_a_process_of_another_user_exists(monkeypatch):
    assert pid_exists(os.getpid())

    def kill(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert pid_exists(1)
    assert Path("/proc/1").exists()


@pytest.fixture(params=[True, False], ids=["with /proc", "without /proc"])
def has_proc(request, monkeypatch):
    monkeypatch.setattr(process_identity, "_has_proc", lambda: request.param)
    return request.param


def test_states_and_parents_match_psutil(has_proc):
    script = "import subprocess; subprocess.run(['sleep', '60'])"
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: psutil.Process(child.pid).children())
        (grandchild,) = psutil.Process(child.pid).children()

        started = [process_stat(process.pid).started for process in (child, grandchild)]
        assert int(started[0]) <= int(started[1])
        assert process_stat(grandchild.pid).parent == child.pid
        assert process_stat(grandchild.pid).name == "sleep"
        grandchild.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_stat(grandchild.pid).state == "T")
        child.kill()
        wait_until(lambda: process_stat(child.pid).state == "Z")
    finally:
        child.kill()
        child.wait()
        grandchild.kill()
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        process_stat(child.pid)


def test_macos_identifies_processes_by_its_boot(tmp_path):
    """So temporary folders and leases of ended processes are released there, too."""
    script = (
        "import dataclasses, json, os\n"
        "from hvd_estimators._util.process_identity import is_dead, is_here, this_process\n"
        "own = this_process()\n"
        "assert is_here(own) and not is_dead(own)\n"
        "assert is_dead(dataclasses.replace(own, started='1'))\n"
        "print(json.dumps(dataclasses.asdict(own)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=like_macos(tmp_path), capture_output=True, text=True
    )

    assert done.stderr == ""
    assert f'"machine": "{BOOT}"' in done.stdout
    assert this_process().machine not in done.stdout
