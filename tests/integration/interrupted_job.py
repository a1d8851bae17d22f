"""Program that fits, is interrupted as in a notebook, fits again, and is terminated.

The arguments are the folder of a store and the folder for the notes of ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import cloudpickle
import torch
from reference import fit
from resuming import DataDependent

from hvd_estimators.store import FilesystemStore

cloudpickle.register_pickle_by_value(sys.modules["resuming"])

SLOW = "slow"
"""A file of the folder: how many seconds a step takes, so that somebody can interrupt training."""

UPLOADS = "uploads"
"""A file of the folder: how many seconds an upload takes, or that it fails."""

EPOCHS = 20


class SlowUploads(FilesystemStore):
    """Store whose checkpoints take as long as a folder's file says, or fail."""

    def __init__(self, prefix_path: str, folder: Path) -> None:
        super().__init__(prefix_path)
        self.uploads = folder / UPLOADS

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file, and wait before it is published."""
        with super().open_atomic(path) as file:
            yield file
            if path.endswith(".ckpt") and self.uploads.exists():
                seconds = self.uploads.read_text()
                (self.uploads.parent / "begun").touch()
                if seconds == "fail":
                    raise OSError("no such luck")
                time.sleep(float(seconds))


class Telling(DataDependent):
    """Module that notes in a folder its training, its process and its rank."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow = Path(self.folder, SLOW)
        if self.training and "HOROVOD_RANK" in os.environ and slow.exists():
            partial = Path(self.folder, f"{os.getpid()}.partial")
            partial.write_text(os.environ["HOROVOD_RANK"])
            partial.rename(partial.with_suffix(".rank"))
            time.sleep(float(slow.read_text()))
        return super().forward(x)


def run(store: Any, backend: Any, folder: str, run_id: str, **params: Any) -> Any:
    """Fit for some epochs of seven steps."""
    net = Telling(folder)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True)
    settings = {"shuffle": True, "scale_learning_rate": True, "batch_size": 8, "validation": 0.1}
    model, _ = fit(
        store,
        2,
        "adam",
        model=net,
        optimizer=optimizer,
        epochs=EPOCHS,
        run_id=run_id,
        **({} if backend is None else {"backend": backend}),
        **settings,
        **params,
    )
    return model


def when_training(folder: Path, act: Any) -> threading.Thread:
    """Act in another thread, once both ranks of the next fit have taken a step."""
    before = set(folder.glob("*.rank"))

    def wait() -> None:
        while len(set(folder.glob("*.rank")) - before) < 2:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def main() -> None:
    from hvd_estimators import Store

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    store, folder = Store.create(sys.argv[1]), Path(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):
        when_training(folder, lambda number=number: os.kill(os.getpid(), number))
        try:
            run(store, None, str(folder), "asked")
        except KeyboardInterrupt:
            print("interrupted", [info.state for info in store.list_runs()], flush=True)
