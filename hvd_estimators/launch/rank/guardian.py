"""A rank's guardian, which ends the rank and its descendants when no process waits for the rank.

The guardian kills the rank. If the rank asked for grace, the guardian sends SIGTERM first, see
`hvd_estimators.launch.rank.graceful_stop`.

A rank cannot watch its parent itself: a Python thread needs the interpreter lock, which a C
extension may hold for minutes. Therefore the process that a rank's parent starts first forks: it
becomes the guardian, which only waits, and its child becomes the rank. If the parent, the guardian
or the rank ends for any reason, the processes below it end, too.

Calls of Linux make this certain. Where forks are unsafe, as on macOS, a thread of the rank waits
for the end of the parent. It ends the rank and the processes of its group, as soon as the rank's
code releases the interpreter lock.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import shutil
import signal
import socket
import struct
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hvd_estimators._util.system import adopt_orphans, die_with_parent, forks_are_safe
from hvd_estimators.launch.rank.graceful_stop import grace_asked

if TYPE_CHECKING:
    import psutil

PID_FILE = "rank.pid"
"""Name of the file in a rank's directory with the rank's process ID, written by the guardian."""

_PARENT_POLL_SECONDS = 0.5
# Helper processes, such as multiprocessing's resource tracker, clean up after the rank has ended.
_GRACE_SECONDS = 0.3
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.01


def split_off_guardian(
    directory: str, lifeline: int, waiting: int | None = None, report: socket.socket | None = None
) -> None:
    """Split into a guardian and its child, the rank. Returns only in the rank.

    Call this while the process has only one thread. When all processes that the rank started have
    ended, the guardian ends like the rank, with the same status or by the same signal. On Linux
    the guardian adopts orphaned descendants of any session or process group. If forks are unsafe,
    this process is the rank, without a guardian.

    Parameters
    ----------
    directory : str
        The rank's directory. Receives a file with the rank's process ID. The guardian deletes the
        directory if the parent ends before the rank.
    lifeline : int
        Descriptor of the reading end of a pipe whose writing end only the parent holds. The
        guardian ends the rank if that end closes, or if the parent ends while its fork keeps the
        end open. It also ends the rank if it receives SIGTERM.
    waiting : int, optional
        Descriptor (``pidfd``) of the process that waits for the rank and counts as its parent.
        Default: the parent process.
    report : socket.socket, optional
        Socket to which the guardian sends its exit status, for a process that is not its parent.
    """
    if not forks_are_safe():
        threading.Thread(target=_end_with_parent, args=(directory, lifeline), daemon=True).start()
        return
    guardian, parent = os.getpid(), os.getppid()
    adopt_orphans()
    waking, wake = os.pipe()
    os.set_blocking(wake, False)
    # This makes poll() return when a child ends.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    rank = os.fork()
    if rank:
        try:
            with contextlib.suppress(OSError):  # the rank may already have filled the disk
                Path(directory, PID_FILE).write_text(str(rank))
            lifelines = [lifeline] if waiting is None else [lifeline, waiting]
            watched = parent if waiting is None else None
            status = _guard(rank, directory, lifelines, waking, watched)
            if report is not None:
                with contextlib.suppress(OSError):
                    report.send(struct.pack("i", status))
            _end_like(status)
        except BaseException:
            traceback.print_exc()
        # The rank dies with its guardian.
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if report is not None:
        report.close()
    for descriptor in (waking, wake, lifeline, *([] if waiting is None else [waiting])):
        os.close(descriptor)
    die_with_parent(guardian)


def _end_with_parent(directory: str, lifeline: int) -> None:
    """Wait for the end of the parent, and end this rank with its process group."""
    os.read(lifeline, 1)
    seconds = grace_asked(directory)
    if seconds:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


class _Descendants:
    """The processes that the rank has started, as far as the guardian has looked for them."""

    def __init__(self) -> None:
        self._started: set[psutil.Process] = set()

    def record(self) -> None:
        """Record the present descendants, whose relation to the guardian may end with the rank."""
        import psutil  # takes some memory, which guardians of running ranks need not hold

        self._started.update(psutil.Process().children(recursive=True))

    def alive(self) -> set[int]:
        """Record descendants, and return the IDs of all recorded ones that have not ended."""
        self.record()
        self._started = set(filter(_is_alive, self._started))
        return {process.pid for process in self._started}


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in ("zombie", "dead")
    except Exception:  # it has ended
        return False


def _guard(rank: int, directory: str, lifelines: list[int], waking: int, parent: int | None) -> int:
    """Wait until the rank and its descendants have ended; return the rank's status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    # The guardian need not keep the rank's pickled call open.
    empty_stdin()
    poller = select.poll()
    for descriptor in (*lifelines, waking):
        poller.register(descriptor, select.POLLIN)
    started = _Descendants()
    has_parent, deadline = True, math.inf
    while (status := _reap(rank)) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            started.record()
            os.kill(rank, signal.SIGKILL)
            status = os.waitpid(rank, 0)[1]
            if has_parent:
                status = signal.SIGTERM  # to observers, SIGTERM ended the rank
            break
        milliseconds = math.ceil(min(left, _PARENT_POLL_SECONDS) * 1000)
        ready = {descriptor for descriptor, _ in poller.poll(milliseconds)}
        if waking in ready:
            os.read(waking, 4096)
        # No process ever writes to a lifeline, so a ready lifeline is closed.
        closed = ready & set(lifelines)
        for lifeline in closed:
            poller.unregister(lifeline)
        if closed or (parent is not None and os.getppid() != parent):
            has_parent = False
        if deadline == math.inf and (signals or not has_parent):
            seconds = grace_asked(directory)
            if seconds:
                os.kill(rank, signal.SIGTERM)
            deadline = time.monotonic() + seconds
    _end_all(started)
    if not has_parent:
        shutil.rmtree(directory, ignore_errors=True)
    return status


def empty_stdin() -> None:
    """Redirect this process's standard input to the null device, so that it is empty."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


def _reap(rank: int) -> int | None:
    """Reap all children that have ended; return the rank's status if the rank is among them."""
    rank_status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == rank:
                rank_status = status
    return rank_status


def _end_all(processes: _Descendants) -> None:
    """End the processes that the rank left behind: first with SIGTERM, after 0.3 s with SIGKILL."""
    started = time.monotonic()
    terminated: set[int] = set()
    # Most ranks leave none, and then psutil need not be imported.
    while time.monotonic() - started < _KILL_SECONDS and _has_children():
        alive = processes.alive()
        is_patient = time.monotonic() - started < _GRACE_SECONDS
        for pid in alive:
            if not is_patient or pid not in terminated:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM if is_patient else signal.SIGKILL)
        terminated.update(alive)
        if not _has_children() and not alive:
            return
        time.sleep(_POLL_SECONDS)


def _has_children() -> bool:
    """Reap all children that have ended; return whether others are left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _end_like(status: int) -> NoReturn:
    """End this process with another process's wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # One core file is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
