"""Checkpoints of a run named ``mine``, saved as rank 0 does and restored as ranks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any

import torch

from hvd_estimators.store.checkpoints import list_checkpoints
from hvd_estimators.training.checkpoint_writer import CheckpointWriter, restore
from hvd_estimators.training.run_state import RunState, read_archive, reading
from hvd_estimators.training.spec import CheckpointOptions, EpochMetrics


class Ranks:
    """Communication of a rank; a broadcast returns ``told``, by default the value passed in."""

    def __init__(self, told: Any = None) -> None:
        self.told = told

    def broadcast(self, value: Any, name: str) -> Any:
        return value if self.told is None else self.told


def state_of(epoch: int, rows: int = 0, loss: float | None = None) -> RunState:
    losses = [1.0 / (n + 1) for n in range(epoch)]
    if loss is not None:
        losses[-1] = loss
    history = tuple(EpochMetrics(n, {"loss": value}) for n, value in enumerate(losses))
    return RunState(epoch, rows, 2, history)


def model_of(epoch: int) -> Callable[[IO[bytes]], None]:
    return lambda file: torch.save({"epoch": epoch, "weight": torch.full((300,), epoch)}, file)


def save(store: Any, *epochs: int, options: CheckpointOptions | None = None) -> None:
    run = store.run_paths("mine")
    with CheckpointWriter(store, run, options or CheckpointOptions("torch")) as writer:
        for epoch in epochs:
            writer.save(state_of(epoch), model_of(epoch))


def restored(store: Any, rank: int = 0, told: Any = None) -> tuple[int, int] | None:
    """Return the epoch in the state and the epoch in the framework's file."""
    loaded: dict[str, Any] = {}

    def load(file: IO[bytes]) -> None:
        loaded.update(torch.load(file, weights_only=True))

    exchange: Any = Ranks(told)
    state = restore(store, store.run_paths("mine"), exchange, rank, load)
    return None if state is None else (state.epoch, loaded["epoch"])


def epochs_in(store: Any) -> list[int]:
    return [info.epoch for info in list_checkpoints(store, store.run_paths("mine"))]


def file_names(store: Any) -> list[str]:
    return store.names(store.get_checkpoint_path("mine"))


def change(store: Any, path: str, content: bytes) -> None:
    store.fs.pipe_file(path, content)


def read_state(store: Any, path: str) -> RunState:
    """Return the state in a checkpoint, without its model."""
    with reading(store, path) as file:
        return read_archive(file)
