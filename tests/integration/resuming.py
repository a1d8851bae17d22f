"""Checkpoints of interrupted runs at all their positions, to resume from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rank_pool import StandingBackend
from reference import WIDTH

from hvd_estimators.launch.backend import Backend
from hvd_estimators.store.checkpoints import list_checkpoints
from hvd_estimators.store.paths import manifest_of


class DataDependent(torch.nn.Module):
    """Net whose random draws depend on its batch, with dropout and batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(WIDTH, 8)
        # Without a momentum it counts batches, whose number may differ between ranks.
        self.norm = torch.nn.BatchNorm1d(8, momentum=None)
        self.dropout = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(8, 1)
        # Differs between ranks.
        self.register_buffer("drawn", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.norm(self.first(x))))
        if self.training:
            noise = torch.randn(1 + int((x[:, 0] > 0).sum()))
            self.drawn += noise.sum()
            hidden = hidden + 0.1 * self.drawn
        return self.last(hidden)


class AskedToEnd(Backend):
    """Backend that sends SIGTERM to one rank during training, which ends all ranks.

    Parameters
    ----------
    standing : StandingBackend
        Runs the ranks.
    after : int
        Number of its steps before the signal; the end of an epoch counts as that of its last step.
    """

    def __init__(self, standing: StandingBackend, after: int) -> None:
        self._standing = standing
        self._after = after

    def num_processes(self) -> int:
        return self._standing.num_processes()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        **others: Any,
    ) -> list[Any]:
        left = self._after

        def asked(*args: Any, **kwargs: Any) -> Any:
            import os
            import signal

            from hvd_estimators.training.step_control import StopRequest

            original = StopRequest.after_step

            def after_step(stop: StopRequest) -> bool:
                nonlocal left
                left -= 1
                if left == 0 and os.environ["HOROVOD_RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGTERM)
                return original(stop)

            StopRequest.after_step = after_step  # type: ignore[method-assign]
            try:
                return fn(*args, **kwargs)
            finally:
                StopRequest.after_step = original  # type: ignore[method-assign]

        return self._standing.run(asked, args, kwargs, env, **others)


def kept_checkpoints(store: Any, run_id: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Make a run of each kept checkpoint of a run; yield their ids and positions."""
    folder = Path(store.get_run_path(run_id))
    for kept in list_checkpoints(store, store.run_paths(run_id)):
        interrupted = Path(store.get_run_path(f"{run_id}-at-{kept.epoch}-{kept.rows}"))
        (interrupted / "checkpoints").mkdir(parents=True)
        for path in (kept.path, manifest_of(kept.path)):
            shutil.copy(path, interrupted / "checkpoints")
        for file in kept.files:
            target = interrupted / "checkpoints" / file.name
            target.parent.mkdir(exist_ok=True)
            shutil.copy(folder / "checkpoints" / file.name, target)
        shutil.copy(folder / "metadata.json", interrupted / "metadata.json")
        yield interrupted.name, (kept.epoch, kept.rows)
