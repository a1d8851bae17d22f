"""The main program of a rank: runs one pickled function and leaves its outcome in a file.

Started by `RankProcess` as ``python -m hvd_estimators.launch.worker DIRECTORY``. Imports neither
PySpark nor a framework.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

import cloudpickle

__all__ = ["CALL_FILE", "OUTCOME_FILE", "main"]

CALL_FILE = "call.pkl"
OUTCOME_FILE = "outcome.pkl"


def main(directory: str) -> int:
    """Run the call in a directory and write its outcome there.

    The outcome is a pickled tuple: ``("result", bytes)`` with the cloudpickled return value, or
    ``("error", type name, traceback)``.

    Returns
    -------
    int
        The exit status: 0, or 1 if the function raised.
    """
    threading.Thread(target=_die_with_parent, args=(directory,), daemon=True).start()
    outcome: tuple[str, ...] | tuple[str, bytes]
    try:
        with open(Path(directory) / CALL_FILE, "rb") as file:
            fn, args, kwargs = cloudpickle.load(file)
        outcome = ("result", cloudpickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:
        traceback.print_exc()
        outcome = ("error", type(error).__name__, traceback.format_exc())
    partial = Path(directory) / f"{OUTCOME_FILE}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    os.replace(partial, Path(directory) / OUTCOME_FILE)
    return 0 if outcome[0] == "result" else 1


def _die_with_parent(directory: str) -> None:
    """Delete the call and kill this process and all that it started once its parent has gone.

    The parent holds the other end of standard input and never writes to it, so that reading ends
    only when the parent does, however it ends.
    """
    while os.read(sys.stdin.fileno(), 1024):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _exit(status: int) -> NoReturn:
    """End the process without taking the interpreter apart, which takes a second with torch."""
    # Horovod's shutdown and other packages' last acts are among these.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _exit(main(sys.argv[1]))
