"""Allreduces, steps of hand-written training, and idle ranks: Horovod, and `torch.distributed`.

Two ranks on this machine, with one thread each. The contenders run in turns; medians count. The
steps train a small network (641 parameters) and a wide one (5 MB of gradients).

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

import torch

from benchmarks.figures import Record, compared, parser, show_result, show_table
from hvd_estimators.launch.local_backend import LocalBackend

RANKS = 2
BATCH = 256
BYTES = {"4 B": 4, "40 kB": 40_000, "1.3 MB": 1_300_000, "5 MB": 5_000_000, "100 MB": 10**8}
TORCH, GLOO, HOROVOD = "torch.distributed", "bare Gloo", "Horovod"
CLOCKED, RELEASED = "Horovod, cycle of 1 ms", "released Horovod"
GROUPED = ", one group"
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
    for index in range(WARM_UP + count):
        if index == WARM_UP:
            processor = time.process_time()
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM_UP:]), (time.process_time() - processor) / count


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
        add(f"allreduce, {name}", reduce, 200 if size < 10**6 else 20)
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
        base = table.removesuffix(GROUPED)
        for what in ("seconds", "processor"):
            values = {
                name + (GROUPED if table.endswith(GROUPED) else ""): [
                    getattr(m, what)[table] for m in all_of
                ]
                for name, all_of in found.items()
                if table in getattr(all_of[0], what)
            }
            if table != base and TORCH in found:
                values[TORCH] = [getattr(m, what)[base] for m in found[TORCH]]
            baseline = GLOO if table.startswith("allreduce") else TORCH
            title = base if what == "seconds" else f"{base}, processor time"
            if what == "seconds" or table.startswith("step"):
                yield from compared(title, values, "s", baseline, middle=True)


def main() -> None:
    options_parser = parser(__doc__, rows=0, repeats=3)
    options_parser.add_argument(
        "--released", type=Path, help="folder with another Horovod (pip install --target)"
    )
    options = options_parser.parse_args()
    given = contenders(options.released)
    found: dict[str, list[Measured]] = {name: [] for name in given}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeats):
            for index, (name, (kind, env)) in enumerate(given.items()):
                backend = LocalBackend(RANKS, verbose=0, warm_start=False)
                meeting = f"{folder}/{turn}-{index}"
                found[name].append(backend.run(measure, (kind, meeting), env=env)[0])
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
