"""Allreduces, and steps by hand and in `fit`: Horovod, and `torch.distributed`.

Two ranks on this machine, with one thread each. The contenders run in turns; medians count. The
steps train a small network (641 parameters) and a wide one (5 MB of gradients). A step of `fit`
includes reading its batch from Parquet, and all checks.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import write_regression_data
from benchmarks.figures import compared, options, show_result
from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch import TorchEstimator

RANKS = 2
BATCH = 256
BYTES = {"4 B": 4, "40 kB": 40_000, "1.3 MB": 1_300_000, "5 MB": 5_000_000, "100 MB": 10**8}
TORCH, GLOO, HOROVOD = "torch.distributed", "bare Gloo", "Horovod"
KINDS = {HOROVOD: "horovod", TORCH: "torch", GLOO: "gloo"}
IN_FIT = ", in fit"
STEPS = {"small": 400, "wide": 60}
WARM_UP = 10


def network(wide: bool) -> torch.nn.Module:
    """Return a network 8-64-1, or one with 1.25 million parameters."""
    torch.manual_seed(1)
    if not wide:
        return torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1), torch.nn.Flatten(0)
        )
    return torch.nn.Sequential(
        torch.nn.Linear(8, 1100),
        torch.nn.ReLU(),
        torch.nn.Linear(1100, 1100),
        torch.nn.ReLU(),
        torch.nn.Linear(1100, 1),
        torch.nn.Flatten(0),
    )


def timed(action: Callable[[], Any], count: int) -> float:
    """Return the median milliseconds of a call."""
    taken = []
    for _ in range(WARM_UP + count):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken[WARM_UP:])


def measure(kind: str, meeting: str) -> dict[str, float]:
    """Measure one contender; return its milliseconds by table. Runs on every rank.

    Parameters
    ----------
    kind : str
        ``"horovod"``, ``"torch"``, or ``"gloo"``, which only reduces.
    meeting : str
        File in which ranks of `torch.distributed` meet.
    """
    torch.set_num_threads(1)
    ranks = HorovodRanks() if kind == "horovod" else DistributedRanks(kind == "gloo", meeting)
    found: dict[str, float] = {}
    for name, size in BYTES.items():
        reduce = functools.partial(ranks.reduce, torch.zeros(size // 4))
        count = 200 if size < 10**6 else max(5, 10**8 // size // 4)
        found[f"allreduce, {name}"] = timed(reduce, count)
    for name, count in (("small", 300), ("wide", 50)) if kind != "gloo" else ():
        model, optimizer = ranks.prepare(network(name == "wide"))
        step = functools.partial(train, model, optimizer, torch.randn(BATCH, 8))
        found[f"step of a {name} network"] = timed(step, count)
    ranks.close()
    return found


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    """Run one step."""
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


class HorovodRanks:
    """A contender's reductions and optimizers with Horovod."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        hvd.init()

    def reduce(self, tensor: torch.Tensor) -> None:
        self._hvd.allreduce_(tensor, name="tensor", op=self._hvd.Sum)

    def prepare(self, net: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        return net, self._hvd.DistributedOptimizer(optimizer, net.named_parameters())

    def close(self) -> None:
        self._hvd.shutdown()


class DistributedRanks:
    """A contender's reductions and models with `torch.distributed`."""

    def __init__(self, bare: bool, meeting: str) -> None:
        import torch.distributed as dist

        rank = int(os.environ["HOROVOD_RANK"])
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
        self._dist = dist
        store = dist.FileStore(f"{meeting}-bare", RANKS)
        self._gloo = dist.ProcessGroupGloo(store, rank, RANKS) if bare else None

    def reduce(self, tensor: torch.Tensor) -> None:
        if self._gloo is not None:
            self._gloo.allreduce([tensor]).wait()
        else:
            self._dist.all_reduce(tensor)

    def prepare(self, net: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        return torch.nn.parallel.DistributedDataParallel(net), optimizer

    def close(self) -> None:
        self._dist.destroy_process_group()
        # See `benchmarks.train_by_hand.train_from_parquet`.
        time.sleep(0.1)


class StepTimes:
    """Callback of `TorchEstimator` that writes the median seconds of rank 0's steps to a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.moments: list[float] = []

    def on_train_begin(self, module: torch.nn.Module, **_: Any) -> None:
        torch.set_num_threads(1)
        module.register_forward_pre_hook(self.add)

    def add(self, *_: Any) -> None:
        self.moments.append(time.perf_counter())

    def on_train_end(self, **_: Any) -> None:
        if os.environ["HOROVOD_RANK"] == "0":
            np.save(self.path, np.median(np.diff(self.moments[WARM_UP:])))


def fit(library: str, folder: Path, name: str) -> float:
    """Train a network in a fit, and return the milliseconds of its steps."""
    net, path = network(name == "wide"), folder / "steps.npy"
    TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-4),
        loss=torch.nn.functional.mse_loss,
        callbacks=[StepTimes(str(path))],
        collectives=library,
        backend=LocalBackend(RANKS, warm_start=False),
        store=Store.create(f"{folder}/store"),
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=BATCH,
        train_steps_per_epoch=STEPS[name],
        epochs=1,
        random_seed=1,
        verbose=0,
    ).fit_on_parquet()
    return 1e3 * float(np.load(path))


def main() -> None:
    given = options(__doc__, repeats=3)
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_path = Store.create(f"{folder}/store").get_train_data_path()
        write_regression_data(folder, Path(train_path), max(STEPS.values()) * BATCH * RANKS)
        for turn in range(given.repeats):
            for contender, kind in KINDS.items():
                backend = LocalBackend(RANKS, verbose=0, warm_start=False)
                taken: dict[str, float] = backend.run(measure, (kind, f"{folder}/{turn}-{kind}"))[0]
                for table, value in taken.items():
                    found.setdefault(table, {}).setdefault(contender, []).append(value)
                for net in STEPS if contender != GLOO else ():
                    of_net = found[f"step of a {net} network"]
                    of_net.setdefault(contender + IN_FIT, []).append(fit(kind, folder, net))
    records = [
        record
        for table, of in found.items()
        for record in compared(table, of, "ms", GLOO if GLOO in of else TORCH, middle=True)
    ]
    show_result("collectives", {**vars(given), "ranks": RANKS}, records)


if __name__ == "__main__":
    main()
