"""Remove Linux features that macOS lacks, in processes whose PYTHONPATH has this folder.

Calls and constants are gone for all code. ``/proc`` is hidden from this package alone, because
psutil reads ``/proc`` where it would ask macOS.
"""

import builtins
import ctypes
import io
import os
import resource
import select
import signal
import socket
import sys

ABSENT = {
    os: (
        *("copy_file_range", "eventfd", "memfd_create", "pidfd_open", "pipe2", "posix_fadvise"),
        *("sched_getaffinity", "sched_setaffinity", "setns", "splice", "unshare"),
        *("O_DIRECT", "O_PATH", "O_TMPFILE", "RTLD_DEEPBIND"),
    ),
    resource: ("prlimit",),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    socket: ("AF_NETLINK", "SO_BINDTODEVICE", "SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
}
PASSED_BY = ("codecs", "contextlib", "genericpath", "io", "os", "pathlib", "posixpath")


class WithoutProc:
    """File system function that does not find ``/proc`` when this package calls it."""

    def __init__(self, function):
        self.function = function

    def __call__(self, path, *args, **kwargs):
        if str(path).startswith("/proc") and is_called_by_the_package():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return self.function(path, *args, **kwargs)


def is_called_by_the_package():
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(PASSED_BY):
        frame = frame.f_back
    spec = frame and frame.f_globals.get("__spec__")
    return bool(spec) and spec.name.startswith("hvd_estimators")


def without_prctl(library, name):
    if name == "prctl":
        raise AttributeError(name)
    return found(library, name)


def without_waking(connection, how):
    """Reject shutting down a listening socket, which wakes its thread on Linux alone."""
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError(57, "Socket is not connected")
    shut_down(connection, how)


for module, names in ABSENT.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
found, ctypes.CDLL.__getattr__ = ctypes.CDLL.__getattr__, without_prctl
shut_down, socket.socket.shutdown = socket.socket.shutdown, without_waking
builtins.open = io.open = WithoutProc(open)
for name in ("listdir", "lstat", "open", "readlink", "scandir", "stat"):
    setattr(os, name, WithoutProc(getattr(os, name)))

try:
    from hvd_estimators._util import system
except ImportError:  # a Python without this package
    pass
else:
    system.PLATFORM = "darwin"
