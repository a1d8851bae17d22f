"""Fallbacks for calls that some systems lack."""

import ast
import os
import sys
from pathlib import Path

import pytest

import hvd_estimators
from hvd_estimators._util import system
from hvd_estimators.launch.warm.client import allows_warm_start

PACKAGE = Path(hvd_estimators.__file__).parent

LINUX_ONLY = {
    *("copy_file_range", "epoll", "eventfd", "inotify_init", "memfd_create", "pidfd_open"),
    *("pidfd_send_signal", "pipe2", "posix_fadvise", "prctl", "sched_getaffinity", "signalfd"),
    *("sched_setaffinity", "sendfile", "setns", "splice", "unshare", "prlimit"),
    *("AF_NETLINK", "SO_BINDTODEVICE", "SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
    *("SOCK_SEQPACKET", "O_DIRECT", "O_PATH", "O_TMPFILE", "RTLD_DEEPBIND", "TCP_USER_TIMEOUT"),
    *("F_OFD_GETLK", "F_OFD_SETLK", "F_OFD_SETLKW"),
}
FOLDERS = ("/proc", "/sys/", "/dev/shm", "/dev/fd")
WITH_FALLBACKS = {
    "_util/lazy_imports.py": "triton, which it is for, needs Linux, too",
    "_util/process_identity.py": "psutil and sysctl take the place of /proc",
    "_util/system.py": "each function has its fallback",
    "launch/rank/guardian.py": "no forks where they are unsafe",
    "launch/warm/client.py": "has_warm_start_calls switches it off",
    "launch/warm/server.py": "has_warm_start_calls switches it off",
}


def linux_only(path):
    """Yield the Linux-only names and folders that a module uses outside comments and docstrings."""
    tree = ast.parse(path.read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in LINUX_ONLY or ast.unparse(node) == "os.fork":
            yield name
        if isinstance(node, ast.Constant) and node not in texts and isinstance(node.value, str):
            yield from (folder for folder in FOLDERS if node.value.startswith(folder))


def test_linux_only_calls_occur_only_in_modules_with_fallbacks():
    users = {
        str(path.relative_to(PACKAGE)): sorted(set(linux_only(path)))
        for path in PACKAGE.rglob("*.py")
    }

    assert {name for name, used in users.items() if used} == set(WITH_FALLBACKS)


def test_an_unnamed_file_replaces_memory_files_if_these_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(system.tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        with system.memory_file() as file:
            file.write(b"secret")
            file.seek(0)
            assert os.read(file.fileno(), 10) == b"secret"
            assert list(tmp_path.iterdir()) == []
        monkeypatch.delattr(os, "memfd_create", raising=False)


def test_available_cores_fall_back_to_all_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    assert system.available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert system.available_cores() == 5


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has them")
def test_warm_start_requires_all_of_its_system_calls(monkeypatch):
    assert allows_warm_start({})
    for owner, name in ((os, "pidfd_open"), (os, "memfd_create"), (system.socket, "SO_PEERCRED")):
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            assert not allows_warm_start({})
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "exists", lambda path: not path.startswith("/proc"))
        assert not allows_warm_start({})
    monkeypatch.setattr(system, "PLATFORM", "darwin")
    assert not allows_warm_start({})
