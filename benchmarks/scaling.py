"""Steps of 1 to 16 ranks, each in its own network namespace with a link of 1 or 10 Gbit/s.

A step sleeps, as if a device computed, and then reduces gradients while its backward pass runs. So
ranks that share cores still wait like ranks on separate hosts. This package's averaging over
``torch.distributed`` is compared with ``DistributedDataParallel`` by hand. Links have a rate but no
delay, because Linux's ``netem`` is missing on many machines. Needs root for the namespaces.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.figures import Record, compared, in_turns, options, show_result
from hvd_estimators.torch.collectives import session
from hvd_estimators.torch.gradients import GradientAverager

OURS, BY_HAND = "ours, torch", "DDP by hand"
WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """Steps of one kind.

    Attributes
    ----------
    name : str
        Name in tables.
    layers : int
        Number of layers of 2^18 32-bit parameters, or 1 MiB of gradients.
    sleep : float
        Seconds of each step in which the rank waits, as for a device.
    """

    name: str
    layers: int
    sleep: float


CASES = (Case("1 MiB, 20 ms", 1, 0.02), Case("16 MiB, 100 ms", 16, 0.1))


def network(case: Case) -> torch.nn.Module:
    """Return a network of equal layers."""
    torch.manual_seed(1)
    layers = (torch.nn.Linear(512, 512, bias=False) for _ in range(case.layers))
    return torch.nn.Sequential(*layers)


def steps(contender: str, case: Case, count: int) -> float:
    """Return the median seconds of a step. Runs on every rank."""
    torch.set_num_threads(1)
    model = network(case)
    with CONTENDERS[contender](model) as trained:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rows = torch.ones(1, 512)
        taken = []
        for _ in range(WARM_UP + count):
            started = time.perf_counter()
            time.sleep(case.sleep)
            optimizer.zero_grad()
            trained(rows).sum().backward()
            optimizer.step()
            taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM_UP:])


@contextlib.contextmanager
def averaged(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Average a model's gradients as `TorchEstimator` does."""
    with session("torch"):
        GradientAverager(model, [], every_parameter=True)
        yield model


@contextlib.contextmanager
def by_hand(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Average a model's gradients with ``DistributedDataParallel``."""
    torch.distributed.init_process_group("gloo")
    yield torch.nn.parallel.DistributedDataParallel(model)
    torch.distributed.destroy_process_group()


CONTENDERS: dict[str, Callable[[torch.nn.Module], Any]] = {OURS: averaged, BY_HAND: by_hand}


def address_of(rank: int) -> str:
    """Return the address of a rank's namespace."""
    return f"10.77.0.{rank + 1}"


@contextlib.contextmanager
def namespaces(ranks: int, gigabits: int) -> Iterator[list[str]]:
    """Yield the names of namespaces that a bridge connects, each over a link of the given rate."""
    prefix = f"scaling{os.getpid()}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{rank}" for rank in range(ranks)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
        _in(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _in(switch, "ip", "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            _in(switch, *f"ip link add {port} type veth peer name wire netns {name}".split())
            _in(switch, "ip", "link", "set", port, "master", "bridge", "up")
            _in(name, "ip", "addr", "add", f"{address_of(rank)}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _in(name, "ip", "link", "set", "dev", device, "up")
            # Each direction has the rate: from the rank, and from the bridge to the rank.
            shape = f"root tbf rate {gigabits}gbit burst {128 * gigabits}kb latency 20ms".split()
            _in(name, "tc", "qdisc", "add", "dev", "wire", *shape)
            _in(switch, "tc", "qdisc", "add", "dev", port, *shape)
        yield names
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def _in(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def measure(names: Sequence[str], contender: str, case: Case, count: int) -> float:
    """Return the median milliseconds of a step, of the slowest rank."""
    given = json.dumps([contender, CASES.index(case), count])
    command = [sys.executable, "-m", "benchmarks.scaling", "--rank", given]
    common = {
        "WORLD_SIZE": str(len(names)),
        "MASTER_ADDR": address_of(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "wire",
    }
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    try:
        return 1e3 * max(float(process.communicate()[0].split()[-1]) for process in running)
    finally:
        for process in running:
            process.kill()


def main() -> None:
    given = options(__doc__, repeats=3, steps=30, ranks=(1, 2, 4, 8, 16), gigabits=(1, 10), rank="")
    if given.rank:
        contender, case, count = json.loads(given.rank)
        print(steps(contender, CASES[case], count), flush=True)
        return
    records: list[Record] = []
    for gigabits, ranks in itertools.product(given.gigabits, given.ranks):
        with namespaces(ranks, gigabits) as names:
            for case in CASES:
                table = f"step of {case.name} over {gigabits} Gbit/s by ranks"
                of = {
                    name: functools.partial(measure, names, name, case, given.steps)
                    for name in CONTENDERS
                }
                taken = in_turns(of, given.repeats)
                records += compared(table, taken, "ms", BY_HAND, at=ranks, middle=True)
    records.sort(key=lambda record: record.table)
    settings = {name: value for name, value in vars(given).items() if name != "rank"}
    show_result("scaling", settings, records)


if __name__ == "__main__":
    main()
