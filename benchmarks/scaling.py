"""Allreduces by bytes and steps by ranks on this machine, compared with the predictions of a model.

The model (`benchmarks.hosts`) is fitted to allreduces of 2 and of 4 ranks, and to the computing and
decoding of one rank alone. It predicts the allreduces of 3 ranks and the steps of 1, 2 and 4. A
step's computing is partly a sleep, so that ranks that share cores behave like ranks with their own
cores. The rest of the computing, decoding and the allreduce share the cores. The model then
predicts more hosts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Record, compared, show_result, show_table
from benchmarks.hosts import Link, Work, efficiency, fitted_link, step_seconds
from benchmarks.loader import write
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.torch.tensors import tensor_batches

GIVEN, HELD_OUT, STEPS_OF = (2, 4), (3,), (1, 2, 4)
BYTES = tuple(4**power for power in range(1, 14))
WARM_UP = 5
BATCH = 32


@dataclass(frozen=True)
class Case:
    """Steps of one kind.

    Attributes
    ----------
    name : str
        Name in tables.
    parameters : int
        Number of 32-bit parameters whose gradients are reduced.
    sleep : float
        Seconds of each step in which the rank computes nothing and waits, as for a device.
    reads : bool
        Whether a batch of 32 images is read from Parquet for each step.
    """

    name: str
    parameters: int
    sleep: float
    reads: bool = False


CASES = (
    Case("2.6 kB, no sleep", 641, 0.0),
    Case("4 MB, 20 ms", 10**6, 0.020),
    Case("64 MB, 50 ms", 16 * 10**6, 0.050),
    Case("4 MB, 5 ms, images", 10**6, 0.005, True),
    Case("4 MB, 80 ms, images", 10**6, 0.080, True),
)

NETWORKS = {"10 Gbit/s": 10e9 / 8, "25 Gbit/s": 25e9 / 8, "100 Gbit/s": 100e9 / 8}
TURN_OF_NETWORK = 50e-6
"""Seconds of a message between hosts of one data centre, over TCP."""

ELSEWHERE = {
    "25.6 million parameters, 300 ms": Work(0.3, 0.0, 0.0, 0.0, 4 * 25.6e6),
    "1 million parameters, 10 ms": Work(0.01, 0.0, 0.0, 0.0, 4e6),
}


def allreduces(repeats: int) -> dict[int, list[float]]:
    """Return ``repeats`` median seconds of allreduces for each size. Runs on every rank."""
    import horovod.torch as hvd

    hvd.init()
    found: dict[int, list[float]] = {}
    for num_bytes in BYTES:
        tensor = torch.zeros(num_bytes // 4)
        count = 20 if num_bytes <= 2**20 else 5
        for _ in range(repeats):
            taken = []
            for index in range(WARM_UP + count):
                started = time.perf_counter()
                hvd.allreduce_(tensor, name="tensor", op=hvd.Sum)
                if index >= WARM_UP:
                    taken.append(time.perf_counter() - started)
            found.setdefault(num_bytes, []).append(statistics.median(taken))
    hvd.shutdown()
    return found


@dataclass(frozen=True)
class Steps:
    """Seconds and processor seconds of a step: means of each turn on one rank."""

    seconds: list[float]
    processor: list[float]


def steps(case: Case, manifest: DatasetManifest, count: int, repeats: int) -> Steps:
    """Run steps of a case. Runs on every rank."""
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    weights = torch.nn.Parameter(torch.zeros(case.parameters))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1e-3), [("w", weights)])
    batches = images(manifest, hvd.rank(), hvd.size()) if case.reads else None
    found = Steps([], [])
    for turn in range(repeats + 1):
        taken, processor = [], time.process_time()
        for _ in range(count):
            started = time.perf_counter()
            if batches is not None:
                next(batches)
            time.sleep(case.sleep)
            optimizer.zero_grad()
            (weights * 1e-3).sum().backward()
            optimizer.step()
            taken.append(time.perf_counter() - started)
        if turn:
            # The mean, because only some steps wait for the reader.
            found.seconds.append(statistics.fmean(taken))
            found.processor.append((time.process_time() - processor) / count)
    hvd.shutdown()
    return found


def reading(manifest: DatasetManifest, count: int, repeats: int) -> Steps:
    """Read batches without computing. Runs on one rank."""
    torch.set_num_threads(1)
    batches = images(manifest, 0, 1)
    found = Steps([], [])
    for turn in range(repeats + 1):
        started, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            next(batches)
        if turn:
            found.seconds.append((time.perf_counter() - started) / count)
            found.processor.append((time.process_time() - processor) / count)
    return found


def images(manifest: DatasetManifest, rank: int, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield a rank's shuffled batches, without end."""
    with ArrowDataModule(
        train_dir=manifest.train.path,
        val_dir=None,
        columns=manifest.columns,
        train_plan=plan_shards(manifest.train.row_groups, ranks),
        cur_shard=rank,
        shard_count=ranks,
        train_batch_size=BATCH,
    ) as module:
        yield from tensor_batches(module.train_chunks())


def predicted(case: Case, ranks: int, link: Link, alone: Steps, read: Steps, cores: int) -> float:
    """Return the model's seconds of a step, from the measurements of one rank alone."""
    compute = max(min(alone.seconds) - case.sleep, 0.0)
    decode = (min(read.seconds), min(read.processor)) if case.reads else (0.0, 0.0)
    work = Work(case.sleep, compute, *decode, 4 * case.parameters)
    return step_seconds(work, ranks, link, ranks, cores)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000, help="a thousandth is of images")
    parser.add_argument("--repeats", type=int, default=8, help="times; the best counts")
    parser.add_argument("--steps", type=int, default=10, help="of each time")
    parser.add_argument("--quick", action="store_true", help="few of each")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats, options.steps = 64_000, 1, 4
    cores = os.cpu_count() or 1
    reduced = {ranks: at_once(ranks, allreduces, options.repeats) for ranks in (*GIVEN, *HELD_OUT)}
    link = fitted_link(
        (
            (ranks, float(num_bytes), min(taken))
            for ranks in GIVEN
            for num_bytes, taken in reduced[ranks].items()
        ),
        cores,
    )
    print(f"an allreduce on this machine: {link}", flush=True)
    records = of_allreduces(reduced, link, cores)
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-scaling-") as folder:
        *_, data = write(Path(folder), options.rows)
        how = (data.manifest, options.steps, options.repeats)
        read = LocalBackend(1).run(reading, how)[0]
        taken: dict[str, dict[int, Steps]] = {}
        alone: dict[str, Steps] = {}
        for case in CASES:
            computing = Case(case.name, case.parameters, case.sleep)
            alone[case.name] = LocalBackend(1).run(steps, (computing, *how))[0]
            taken[case.name] = {
                ranks: LocalBackend(ranks).run(steps, (case, *how))[0] for ranks in STEPS_OF
            }
    model = {
        case.name: {
            ranks: predicted(case, ranks, link, alone[case.name], read, cores) for ranks in STEPS_OF
        }
        for case in CASES
    }
    records += of_steps(taken, model)
    records += of_more_hosts(link)
    settings = {
        **vars(options),
        "allreduce_fixed_ms": round(link.fixed_seconds * 1e3, 3),
        "turn_ms": round(link.turn_seconds * 1e3, 3),
        "loopback_MB_per_s": round(link.bytes_per_second / 1e6),
        "images_per_s": round(BATCH / min(read.seconds)),
    }
    figures = {
        "allreduces": reduced,
        "link": asdict(link),
        "reading": asdict(read),
        "alone": {name: asdict(of) for name, of in alone.items()},
        "steps": {name: {n: asdict(s) for n, s in of.items()} for name, of in taken.items()},
    }
    show_result("scaling", settings, figures, records)


def at_once(ranks: int, function: Any, *arguments: Any) -> dict[int, list[float]]:
    """Run a function on the given number of local ranks, and return the first rank's result."""
    found: dict[int, list[float]] = LocalBackend(ranks).run(function, arguments)[0]
    return found


def of_allreduces(
    reduced: Mapping[int, Mapping[int, list[float]]], link: Link, cores: int
) -> list[Record]:
    """Return the records of allreduces: measured and predicted, by bytes."""
    records = []
    for ranks, sizes in sorted(reduced.items()):
        stretch = max(1.0, ranks / cores)
        for num_bytes, taken in sizes.items():
            model = link.allreduce_seconds(ranks, num_bytes, stretch)
            both = {
                f"{ranks} ranks, measured": [1e3 * each for each in taken],
                f"{ranks} ranks, predicted": [1e3 * model],
            }
            records += compared("allreduce by bytes", both, "ms", at=num_bytes)
    return records


def of_steps(
    taken: Mapping[str, Mapping[int, Steps]], model: Mapping[str, Mapping[int, float]]
) -> list[Record]:
    """Return the records of steps: measured and predicted, by ranks, and their ratios."""
    records, ratios = [], {}
    for name, of_ranks in taken.items():
        for ranks, measured in of_ranks.items():
            both = {
                "measured": [1e3 * each for each in measured.seconds],
                "predicted": [1e3 * model[name][ranks]],
            }
            records += compared(f"step of {name} by ranks", both, "ms", at=ranks)
            ratio = model[name][ranks] / min(measured.seconds)
            ratios[f"{name}, {ranks} rank{'s' * (ranks > 1)}"] = [ratio]
    show_table("steps, predicted of measured", ["", "ratio"], [[k, *v] for k, v in ratios.items()])
    return [*records, *compared("steps, predicted of measured", ratios, "")]


def of_more_hosts(link: Link) -> list[Record]:
    """Return the predictions for hosts with a rank each, over other networks."""
    records = []
    for name, work in ELSEWHERE.items():
        for network, speed in NETWORKS.items():
            other = Link(link.fixed_seconds, TURN_OF_NETWORK, speed)
            for ranks in (1, 2, 4, 8, 16, 32, 64):
                value = {f"{network}, predicted": [efficiency(work, ranks, other)]}
                records += compared(
                    f"share of linear scaling, {name} by ranks", value, "", at=ranks
                )
    return records


if __name__ == "__main__":
    main()
