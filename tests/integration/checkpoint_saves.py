"""Checkpoints with known bytes, written and looked up without training."""

from __future__ import annotations

import json
import random
import sys
import zipfile
from typing import IO, Any

from hvd_estimators import Store
from hvd_estimators.store.checkpoints import check_valid, find_newest_valid
from hvd_estimators.training.checkpoint_writer import CheckpointWriter
from hvd_estimators.training.run_state import RunState, read_archive
from hvd_estimators.training.spec import CheckpointOptions, EpochMetrics

KIB = 1024


def save(store: Any, epoch: int, size: int = 256 * KIB, run_id: str = "run") -> None:
    """Save the checkpoint of an epoch as rank 0 does, and wait until it is in the store."""

    def write_model(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("content", random.Random(epoch).randbytes(size))

    history = tuple(EpochMetrics(i, {"loss": 1.0 / (i + 1)}) for i in range(epoch))
    state = RunState(epoch, 0, 1, history)
    with CheckpointWriter(store, store.run_paths(run_id), CheckpointOptions("torch")) as writer:
        writer.save(state, write_model)


def newest(store: Any, run_id: str = "run") -> int:
    """Return the epoch of the newest complete checkpoint, or 0 if there is none."""
    found = find_newest_valid(store, store.run_paths(run_id), lambda info: check_valid(store, info))
    if found is None:
        return 0
    with store.open(found[0].path) as file:
        assert read_archive(file).epoch == found[0].epoch
    return found[0].epoch


if __name__ == "__main__":
    # In a process with other permissions than the tests.
    save(Store.create(sys.argv[1], **json.loads(sys.argv[3])), int(sys.argv[2]))
