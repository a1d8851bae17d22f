"""Steps of a build that run in processes of their own: their log, and what is said of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from hvd_estimators.exceptions import BuildError

__all__ = ["Report", "run_logged"]

Report = Callable[[str], None]
"""Called with each line of progress."""

_FIRST_ERRORS = 5
_TAIL_LINES = 20
_LINE_LENGTH = 200
_SIGN_OF_LIFE_SECONDS = 15.0
_ERROR = re.compile(r"\berror\b:|CMake Error", re.IGNORECASE)
_PROGRESS = re.compile(rb"^\s*(\[ *\d+%\] [^\r\n]*)$", re.MULTILINE)  # a line of CMake's


def run_logged(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: BinaryIO,
    report: Report,
    what: str,
) -> None:
    """Run `command` with its output in a file, and say now and then how far it is."""
    log = Path(output.name)
    started = time.monotonic()
    # A group of its own, so that make and its compilers end with pip when the build is stopped.
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while True:
            try:
                process.wait(timeout=_SIGN_OF_LIFE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                minutes, seconds = divmod(int(time.monotonic() - started), 60)
                report(f"  {minutes}:{seconds:02d} {_progress(log)}")
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    if process.returncode:
        raise BuildError(
            f"{what} failed with exit status {process.returncode}. The whole log is {log}; "
            f"what it says:\n{_digest(log)}"
        )


def _digest(log: Path) -> str:
    """Return the first compiler errors and the end of a log, with its long commands cut."""
    lines = [line.strip()[:_LINE_LENGTH] for line in log.read_text(errors="replace").splitlines()]
    end = lines[-_TAIL_LINES:]
    errors = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)][:_FIRST_ERRORS]
    return "\n".join([*errors, *(["..."] if errors else []), *end])


def _progress(log: Path) -> str:
    with log.open("rb") as lines:
        lines.seek(max(0, log.stat().st_size - 2**18))
        steps = _PROGRESS.findall(lines.read())
    return steps[-1].decode(errors="replace") if steps else "preparing"
