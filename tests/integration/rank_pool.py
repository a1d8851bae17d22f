"""Rank processes kept for many fits, because starting ranks takes longer than small fits."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.local_backend import LocalBackend

_IMPORTED = {
    "torch": ("hvd_estimators.lightning.trainer", "pytorch_lightning"),
    "tensorflow": ("hvd_estimators.keras.trainer", "keras"),
    "keras": ("hvd_estimators.keras.trainer", "keras"),
}

_SECONDS_TO_END = 20


class StandingBackend(Backend):
    """Backend that runs every call in the same processes; a context manager.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    directory : Path
        Folder in which calls and results are exchanged.
    framework : str
        Horovod's name for the framework that trains: ``torch``, which includes Lightning, or
        ``tensorflow``. ``keras`` is Keras on torch, without Horovod.
    """

    def __init__(self, ranks: int, directory: Path, framework: str = "torch") -> None:
        self.ranks = ranks
        self._framework = framework
        self.results: list[Any] = []
        self.directory = directory
        self._calls = 0

    def __enter__(self) -> StandingBackend:
        self.directory.mkdir(parents=True, exist_ok=True)
        # A warm process imports the modules of calls once, for all ranks of a session.
        serve = (_serve, (str(self.directory), self._framework, _IMPORTED[self._framework]))
        self._thread = threading.Thread(target=LocalBackend(self.ranks).run, args=serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _publish(self.directory / f"call-{self._calls}", b"")
        self._thread.join(timeout=_SECONDS_TO_END)
        # Ranks that still wait for others, after a call that failed.
        _publish(self.directory / "end", b"")
        self._thread.join()

    def num_processes(self) -> int:
        return self.ranks

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        call, self._calls = self._calls, self._calls + 1
        _publish(self.directory / f"call-{call}", cloudpickle.dumps((fn, args, kwargs or {})))
        answers = [self.directory / f"answer-{call}-{rank}" for rank in range(self.ranks)]
        self.results, first = [], None
        while not all(answer.exists() for answer in answers):
            assert self._thread.is_alive(), "the ranks have ended"
            given = [answer for answer in answers if answer.exists()]
            first = first or (time.monotonic() if given else None)
            # The others may wait for a rank that has failed.
            if first is not None and time.monotonic() - first > 30:
                _results(given)
            time.sleep(0.02)
        self.results = _results(answers)
        return self.results


def _results(answers: Sequence[Path]) -> list[Any]:
    found = [pickle.loads(answer.read_bytes()) for answer in answers]
    for kind, value in found:
        assert kind == "result", value
    return [value for _, value in found]


def _serve(directory: str, framework: str, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    if framework != "keras":
        hvd = importlib.import_module(f"horovod.{framework}")
        hvd.init()
        # Ranks that shut down and return would find each other's old addresses.
        hvd.shutdown = lambda: None
    threading.Thread(target=_end_if_told, args=(Path(directory),), daemon=True).start()
    rank = os.environ["HOROVOD_RANK"]
    for call in range(1_000_000):
        path = Path(directory) / f"call-{call}"
        while not path.exists():
            time.sleep(0.02)
        document = path.read_bytes()
        if not document:
            return
        fn, args, kwargs = pickle.loads(document)
        try:
            answer = ("result", fn(*args, **kwargs))
        except Exception:
            answer = ("error", traceback.format_exc())
        _publish(Path(directory) / f"answer-{call}-{rank}", cloudpickle.dumps(answer))


def _end_if_told(directory: Path) -> None:
    while not (directory / "end").exists():
        time.sleep(0.5)
    os._exit(1)


def _publish(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)


_shared: dict[tuple[int, str], StandingBackend] = {}


def shared_ranks(ranks: int, framework: str = "torch") -> StandingBackend:
    """Return ranks shared by all fits of a test module; conftest.py ends them after the module.

    Ranks of at most one other number or framework stay: idle ranks use 7 % of a core each.
    """
    backend = _shared.pop((ranks, framework), None)
    if backend is None:
        end_shared_ranks(but=1)
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        backend = StandingBackend(ranks, folder, framework).__enter__()
    _shared[ranks, framework] = backend
    return backend


def end_shared_ranks(but: int = 0) -> None:
    """End all shared ranks except the last used ones, and delete their folders."""
    while len(_shared) > but:
        backend = _shared.pop(next(iter(_shared)))
        backend.__exit__()
        shutil.rmtree(backend.directory)
