"""Allreduces, steps by hand and in `fit`, and idle ranks: Horovod, and `torch.distributed`.

Two ranks on this machine, with one thread each. The contenders run in turns; medians count. The
steps train a small network (641 parameters) and a wide one (5 MB of gradients). A step of `fit`
includes reading its batch from Parquet, and all checks.

"Horovod, cycle of 1 ms" is this package's build with ``HOROVOD_CYCLE_TIME=1``, with which its
background thread sleeps as in the release. ``--released`` adds another build of Horovod.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import write_regression_data
from benchmarks.figures import Record, compared, parser, show_result, show_table
from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch import TorchEstimator

RANKS = 2
BATCH = 256
BYTES = {"4 B": 4, "40 kB": 40_000, "1.3 MB": 1_300_000, "5 MB": 5_000_000, "100 MB": 10**8}
TORCH, GLOO, HOROVOD = "torch.distributed", "bare Gloo", "Horovod"
CLOCKED, RELEASED = "Horovod, cycle of 1 ms", "released Horovod"
GROUPED, IN_FIT = ", one group", ", in fit"
STEPS = {"small": 400, "wide": 60}
WARM_UP = 10
IDLE_SECONDS = 2.0


@dataclass(frozen=True)
class Measured:
    """Median seconds of rank 0 by table, and processor seconds of the same steps."""

    seconds: dict[str, float]
    processor: dict[str, float]


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


def timed(action: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return the median seconds and the mean processor seconds of a call."""
    taken = []
    warm_up = min(WARM_UP, count)
    for index in range(warm_up + count):
        if index == warm_up:
            processor = time.process_time()
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[warm_up:]), (time.process_time() - processor) / count


def measure(kind: str, meeting: str) -> Measured:
    """Measure one contender. Runs on every rank.

    Parameters
    ----------
    kind : str
        ``"horovod"``, ``"torch"``, or ``"gloo"``, which only reduces.
    meeting : str
        File in which ranks of `torch.distributed` meet.
    """
    torch.set_num_threads(1)
    ranks = HorovodRanks() if kind == "horovod" else DistributedRanks(kind == "gloo", meeting)
    result = Measured({}, {})

    def add(table: str, action: Callable[[], Any], count: int) -> None:
        result.seconds[table], result.processor[table] = timed(action, count)

    for name, size in BYTES.items():
        reduce = functools.partial(ranks.reduce, torch.zeros(size // 4))
        add(f"allreduce, {name}", reduce, 200 if size < 10**6 else max(5, 10**8 // size // 4))
    for name, count in (("small", 300), ("wide", 50)):
        for way in ranks.ways:
            model, optimizer = ranks.prepare(network(name == "wide"), way)
            step = functools.partial(train, model, optimizer, torch.randn(BATCH, 8))
            add(f"step of a {name} network{way}", step, count)
    add("idle", functools.partial(time.sleep, IDLE_SECONDS / 20), 20)
    ranks.close()
    return result


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    """Run one step."""
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


class HorovodRanks:
    """A contender's reductions and optimizers with Horovod."""

    ways = ("", GROUPED)

    def __init__(self) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        hvd.init()

    def reduce(self, tensor: torch.Tensor) -> None:
        self._hvd.allreduce_(tensor, name="tensor", op=self._hvd.Sum)

    def prepare(self, net: torch.nn.Module, way: str) -> tuple[torch.nn.Module, Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        groups = 1 if way == GROUPED else 0
        return net, self._hvd.DistributedOptimizer(
            optimizer, net.named_parameters(), num_groups=groups
        )

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
        self.ways = () if bare else ("",)

    def reduce(self, tensor: torch.Tensor) -> None:
        if self._gloo is not None:
            self._gloo.allreduce([tensor]).wait()
        else:
            self._dist.all_reduce(tensor)

    def prepare(self, net: torch.nn.Module, way: str) -> tuple[torch.nn.Module, Any]:
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
        self.processor: list[float] = []

    def on_train_begin(self, module: torch.nn.Module, **_: Any) -> None:
        torch.set_num_threads(1)
        module.register_forward_pre_hook(self.add)

    def add(self, *_: Any) -> None:
        self.moments.append(time.perf_counter())
        self.processor.append(time.process_time())

    def on_train_end(self, **_: Any) -> None:
        if os.environ["HOROVOD_RANK"] == "0":
            steps = np.diff(self.moments[WARM_UP:])
            used = self.processor[-1] - self.processor[WARM_UP]
            np.save(self.path, [np.median(steps), used / len(steps)])


def fit(library: str, env: Mapping[str, str], folder: Path, name: str) -> tuple[float, float]:
    """Train a network in a fit, and return the seconds and processor seconds of its steps."""
    net, path = network(name == "wide"), folder / "steps.npy"
    TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-4),
        loss=torch.nn.functional.mse_loss,
        callbacks=[StepTimes(str(path))],
        collectives=library,
        backend=LocalBackend(RANKS, env=env, warm_start=False),
        store=Store.create(f"{folder}/store"),
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=BATCH,
        train_steps_per_epoch=STEPS[name],
        epochs=1,
        random_seed=1,
        verbose=0,
    ).fit_on_parquet()
    seconds, processor = np.load(path)
    return float(seconds), float(processor)


def contenders(released: Path | None) -> dict[str, tuple[str, Mapping[str, str]]]:
    """Return the kind of each contender and its environment variables."""
    result: dict[str, tuple[str, Mapping[str, str]]] = {
        HOROVOD: ("horovod", {}),
        CLOCKED: ("horovod", {"HOROVOD_CYCLE_TIME": "1"}),
        TORCH: ("torch", {}),
        GLOO: ("gloo", {}),
    }
    if released is not None:
        path = os.pathsep.join(filter(None, [str(released), os.environ.get("PYTHONPATH")]))
        result[RELEASED] = ("horovod", {"PYTHONPATH": path})
    return result


def records(found: Mapping[str, list[Measured]]) -> Iterator[Record]:
    """Yield the figures of all tables."""
    tables = list(dict.fromkeys(t for all_of in found.values() for m in all_of for t in m.seconds))
    for table in tables:
        if table == "idle":
            shares = {
                name: [m.processor[table] / (IDLE_SECONDS / 20) for m in all_of]
                for name, all_of in found.items()
                if table in all_of[0].processor
            }
            yield from compared("share of a core, idle rank", shares, "cores", middle=True)
            continue
        way = next((way for way in (GROUPED, IN_FIT) if table.endswith(way)), "")
        base = table.removesuffix(way)
        for what in ("seconds", "processor"):
            values = {
                name + way: [getattr(m, what)[table] for m in all_of]
                for name, all_of in found.items()
                if table in getattr(all_of[0], what)
            }
            if way and TORCH in found:
                values[TORCH] = [getattr(m, what)[base] for m in found[TORCH]]
            if what == "seconds" or base.startswith("step"):
                title = base if what == "seconds" else f"{base}, processor time"
                baseline = GLOO if base.startswith("allreduce") else TORCH
                shown = compared(title, values, "s", baseline, middle=True)
                yield from (record for record in shown if not way or record.name != TORCH)


def main() -> None:
    options_parser = parser(__doc__, rows=0, repeats=3)
    options_parser.add_argument(
        "--released", type=Path, help="folder with another Horovod (pip install --target)"
    )
    options = options_parser.parse_args()
    given = contenders(options.released)
    found: dict[str, list[Measured]] = {name: [] for name in given}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_path = Store.create(f"{folder}/store").get_train_data_path()
        write_regression_data(folder, Path(train_path), max(STEPS.values()) * BATCH * RANKS)
        for turn in range(options.repeats):
            for index, (name, (kind, env)) in enumerate(given.items()):
                backend = LocalBackend(RANKS, verbose=0, warm_start=False)
                meeting = f"{folder}/{turn}-{index}"
                measured: Measured = backend.run(measure, (kind, meeting), env=env)[0]
                if name in (HOROVOD, TORCH):
                    for net in STEPS:
                        table = f"step of a {net} network{IN_FIT}"
                        steps = fit(kind, env, folder, net)
                        measured.seconds[table], measured.processor[table] = steps
                found[name].append(measured)
    result = list(records(found))
    for table in dict.fromkeys(record.table for record in result):
        rows = [
            (record.name, record.value, record.low, record.high, record.ratio or "")
            for record in result
            if record.table == table
        ]
        show_table(table, ("", "median", "least", "most", "ratio"), rows)
    figures = {name: [asdict(measured) for measured in all_of] for name, all_of in found.items()}
    show_result("collectives", {"repeats": options.repeats, "ranks": RANKS}, figures, result)


if __name__ == "__main__":
    main()
