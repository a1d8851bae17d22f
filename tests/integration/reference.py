"""Reference training in one process, with plain torch, and its data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from estimators import exact_params
from parquet_files import write_columns

from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch import TorchEstimator

WIDTH = 4


class RecordingBackend(LocalBackend):
    """Backend that keeps the result of every rank."""

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.results = super().run(*args, **kwargs)
        return self.results


def write_rows(path: Path, rows: int, files: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """Write rows as Parquet files and return them as arrays."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    columns = {
        "id": np.arange(rows),
        "features": features,
        "label": (features @ np.arange(1, WIDTH + 1) + 0.5).astype(np.float32),
        "weight": rng.uniform(0.1, 3.0, size=rows),
    }
    for index, part in enumerate(np.array_split(np.arange(rows), min(files, rows))):
        rows_of_file = {name: array[part] for name, array in columns.items()}
        write_columns(path, rows_of_file, row_group_size=17, name=f"part-{index:03d}.parquet")
    return columns


class Block(torch.nn.Module):
    """Residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def make_net() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def global_batches(rows: int, ranks: int, batch_size: int) -> list[np.ndarray]:
    """Compute the rows of each step without shuffling, from the guarantees alone.

    Ranks hold contiguous shares that differ by at most one row. A share is cut into full batches;
    the last ones are smaller, so that all ranks take the same number of steps.
    """
    bounds = [rows * rank // ranks for rank in range(ranks + 1)]
    longest = max(np.diff(bounds))
    steps = int(np.ceil(longest / batch_size))
    batches: list[list[int]] = [[] for _ in range(steps)]
    for start, stop in itertools.pairwise(bounds):
        position = start
        for step in range(steps):
            left = stop - position
            # As many rows as leave one for each later step; rows run out only at the end.
            most = min(batch_size, max(left - (steps - step - 1), min(left, 1)))
            batches[step].extend(range(position, position + most))
            position += most
        assert position == stop
    return [np.array(batch) for batch in batches]


def train_alone(
    columns: dict[str, np.ndarray],
    batches: Sequence[np.ndarray],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    epochs: int,
    passes: int = 1,
    clip: float = float("inf"),
) -> torch.nn.Sequential:
    """Train in one process, with plain torch."""
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    for _ in range(epochs):
        for first in range(0, len(batches), passes):
            rows = np.concatenate(batches[first : first + passes])
            output = net(torch.from_numpy(columns["features"][rows])).reshape(-1)
            label = torch.from_numpy(columns["label"][rows])
            loss = ((output - label) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return net


def fit(store: Any, ranks: int, name: str, **params: Any) -> tuple[Any, Any]:
    """Fit the reference's net; return the model and the backend with the ranks' results."""
    net = make_net()
    backend = params.pop("backend", None) or RecordingBackend(ranks)
    paths = {name: params.pop(name, None) for name in ("path", "validation_path")}
    kind: type[TorchEstimator] = params.pop("kind", TorchEstimator)
    estimator = kind(
        **exact_params(
            backend,
            store,
            **{
                "model": net,
                "optimizer": OPTIMIZERS[name](net.parameters()),
                "loss": torch.nn.functional.mse_loss,
                **params,
            },
        )
    )
    return estimator.fit_on_parquet(**paths), backend


def assert_same_weights(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    for (name, a), (_, b) in zip(
        found.named_parameters(), expected.named_parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
