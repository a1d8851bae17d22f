"""Warnings of ranks that train."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any


class Warnings:
    """Callback that writes the warnings of each rank to files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def of(folder: Path, rank: int) -> str:
        """Return the warnings of a rank."""
        return (folder / f"{rank}.log").read_text()

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        from hvd_estimators.torch.collectives import current

        path = self._folder / f"{current().rank}.log"
        path.unlink(missing_ok=True)
        self._handler = logging.FileHandler(path)
        logging.getLogger("hvd_estimators").addHandler(self._handler)

    def on_train_end(self) -> None:
        logging.getLogger("hvd_estimators").removeHandler(self._handler)
        self._handler.close()
