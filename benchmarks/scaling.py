"""Steps of 1 to 16 ranks, each in its own network namespace with a link of 1 or 10 Gbit/s.

A step sleeps, as if a device computed, and then reduces gradients while its backward pass runs. So
ranks that share cores still wait like ranks on separate hosts. This package's averaging, over
Horovod and over torch, is compared with ``DistributedDataParallel`` by hand. Links have a rate but
no delay, because Linux's ``netem`` is missing on many machines. Needs root for the namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.figures import Record, compared, show_result, show_table
from hvd_estimators.launch.rank.environment import Master, assign_ranks, child_environment
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.process import pickle_call
from hvd_estimators.launch.rank.supervisor import start_rank, supervise
from hvd_estimators.launch.rendezvous.channel import new_secret
from hvd_estimators.launch.rendezvous.client import LocalRendezvousClient, RemoteRendezvousClient
from hvd_estimators.launch.rendezvous.server import RendezvousServer

HOROVOD, OURS, BY_HAND = "ours, Horovod", "ours, torch", "DDP by hand"
MASTER_PORT = 29500
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
def averaged(model: torch.nn.Module, *, library: str) -> Iterator[torch.nn.Module]:
    """Average a model's gradients as `TorchEstimator` does."""
    from hvd_estimators.torch.collectives import session
    from hvd_estimators.torch.gradients import GradientAverager

    with session(library):
        GradientAverager(model, [], every_parameter=True)
        yield model


@contextlib.contextmanager
def by_hand(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Average a model's gradients with ``DistributedDataParallel``."""
    torch.distributed.init_process_group("gloo")
    yield torch.nn.parallel.DistributedDataParallel(model)
    torch.distributed.destroy_process_group()


CONTENDERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    HOROVOD: functools.partial(averaged, library="horovod"),
    OURS: functools.partial(averaged, library="torch"),
    BY_HAND: by_hand,
}


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
    """Return the median seconds of a step, of the slowest rank."""
    secret, run_id = new_secret().hex(), uuid.uuid4().hex
    given = [contender, CASES.index(case), count, len(names), secret, run_id]
    command = [sys.executable, "-m", "benchmarks.scaling", "--rank"]
    running = []
    try:
        for rank, name in enumerate(names):
            port = running[0].port if running else 0
            running.append(_Parent(["ip", "netns", "exec", name, *command], [rank, port, *given]))
        return max(parent.result() for parent in running)
    finally:
        for parent in running:
            parent.end()


class _Parent:
    """Process in a namespace that starts one rank; the first also serves the rendezvous."""

    def __init__(self, command: Sequence[str], given: Sequence[Any]) -> None:
        self._process = subprocess.Popen(
            [*command, json.dumps(given)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.port = int(self._output.readline())

    def result(self) -> float:
        return float(self._output.readline())

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def parent_of(
    rank: int, port: int, contender: str, case: int, count: int, ranks: int, *secrets: str
) -> None:
    """Start one rank in this namespace, and print the rendezvous' port and the rank's result."""
    secret, run_id = bytes.fromhex(secrets[0]), secrets[1]
    slots = assign_ranks([f"host-{number}" for number in range(ranks)])
    with contextlib.ExitStack() as stack:
        client: Any
        if rank == 0:
            server = stack.enter_context(RendezvousServer(secret, [address_of(0)]))
            server.store.expect([slot.hostname for slot in slots])
            server.listen(address_of(0))
            port = server.endpoints[0][1]
            client = LocalRendezvousClient(server.store, 0)
        else:
            client = RemoteRendezvousClient((address_of(0), port), secret, rank, "host-0")
            stack.enter_context(client)
        print(port, flush=True)
        process = stack.enter_context(
            start_rank(
                *(slots[rank], address_of(rank), client),
                call=pickle_call(steps, (contender, CASES[case], count), {}),
                secret=secret,
                environment=lambda *of_rank: child_environment(dict(os.environ), *of_rank),
                master=Master(address_of(0), MASTER_PORT, run_id),
                gpus={},
                on_lines=lambda stream, lines: sys.stderr.writelines(lines),
            )
        )
        (outcome,) = supervise([process], client.failure)
        print(_value(outcome), flush=True)
        client.notify("done")
        if rank == 0:
            server.store.wait_for_all()


def _value(outcome: RankOutcome) -> float:
    if outcome.result is None:
        raise SystemExit(f"rank {outcome.rank}: {outcome.error}")
    return float(pickle.loads(outcome.result))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="ignored: there is no data")
    parser.add_argument("--repeats", type=int, default=3, help="launches; the median counts")
    parser.add_argument("--steps", type=int, default=30, help="of each launch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--gigabits", type=int, nargs="+", default=[1, 10], help="per second")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        parent_of(*json.loads(options.rank))
        return
    records: list[Record] = []
    figures: dict[str, Any] = {}
    for gigabits in options.gigabits:
        for ranks in options.ranks:
            with namespaces(ranks, gigabits) as names:
                for case in CASES:
                    table = f"step of {case.name} over {gigabits} Gbit/s by ranks"
                    taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
                    for _ in range(options.repeats):
                        for name, found in taken.items():
                            found.append(1e3 * measure(names, name, case, options.steps))
                    figures[f"{table}, {ranks}"] = taken
                    records += compared(table, taken, "ms", BY_HAND, at=ranks, middle=True)
                    print(table, ranks, taken, flush=True)
    for table in dict.fromkeys(record.table for record in records):
        rows = [[one.at, one.name, one.value, one.ratio] for one in records if one.table == table]
        show_table(table, ["ranks", "", "ms", f"of {BY_HAND}"], rows)
    settings = {
        name: value for name, value in vars(options).items() if name not in ("rows", "rank")
    }
    show_result("scaling", settings, figures, records)


if __name__ == "__main__":
    main()
