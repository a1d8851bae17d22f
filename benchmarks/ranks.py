"""Seconds in which ranks find each other, from 2 to 32 real ranks, and for 1,000 simulated ones.

Real ranks run on this machine, so their connections, N^2 / 2 of them, share its cores. Each number
of ranks is launched twice, and the second launch counts. It is measured from the call to the end of
the first allreduce, and ``init`` alone: with Horovod, and with torch's Gloo over this package's
rendezvous and over torch's own ``TCPStore``.

Simulated ranks are threads of a few processes that send the rendezvous the messages of as many
real ones, and check the answers. They do not connect to each other. Simulated tasks exchange one
message per task over the driver. A real task unpacks the answer with its own core, so here only one
task per process does, after the exchange.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.figures import Record, compared, show_result, show_table

# TensorFlow prints notices in each rank that imports it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from hvd_estimators.launch import LocalBackend
from hvd_estimators.launch.rendezvous.channel import new_secret
from hvd_estimators.launch.rendezvous.client import RemoteRendezvousClient
from hvd_estimators.launch.rendezvous.gloo_http import GlooKeys
from hvd_estimators.launch.rendezvous.server import RendezvousServer
from hvd_estimators.launch.service.events import receive_events
from hvd_estimators.launch.service.exchange import ExchangeServer, unpacked
from hvd_estimators.launch.service.server import DriverService, connect_to_driver

HOROVOD, OURS, TCP_STORE = "Horovod", "torch", "torch, TCPStore"
# The scopes that hvd.init() connects on one host: all ranks, twice, and those of the host, twice.
SCOPES = ("global_", "local_host", "global__process_set_hash_1", "local_host_process_set_hash_1")
ADDRESS_BYTES = 136
"""Length of an address of Horovod's Gloo: a ``sockaddr_storage`` and a number of 8 bytes."""

PROCESSES = 2
"""Processes whose threads are simulated ranks."""

LIMIT = 300.0
"""Seconds after which a simulation has failed."""


def connect_horovod() -> tuple[float, float]:
    """Return the seconds of ``hvd.init()``, and the time of the first allreduce's end."""
    import time

    import horovod.torch as hvd
    import torch

    started = time.perf_counter()
    hvd.init()
    init = time.perf_counter() - started
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
    reached = time.time()
    hvd.shutdown()
    return init, reached


def connect_torch() -> tuple[float, float]:
    """Return the seconds of connecting this package's collectives, and as `connect_horovod`."""
    import time

    import torch

    from hvd_estimators.torch.collectives import session

    started = time.perf_counter()
    with session("torch", use_gpu=False) as collectives:
        init = time.perf_counter() - started
        assert float(collectives.reduce(torch.ones(1), "sum", "first")) == collectives.size
        reached = time.time()
    return init, reached


def connect_tcp_store() -> tuple[float, float]:
    """Return the seconds of ``init_process_group``, and as `connect_horovod`."""
    import time

    import torch
    import torch.distributed as dist

    started = time.perf_counter()
    dist.init_process_group("gloo")
    init = time.perf_counter() - started
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert float(ones) == dist.get_world_size()
    reached = time.time()
    dist.destroy_process_group()
    return init, reached


CONTENDERS: dict[str, Callable[[], tuple[float, float]]] = {
    HOROVOD: connect_horovod,
    OURS: connect_torch,
    TCP_STORE: connect_tcp_store,
}


def launch(ranks: int, connect: Callable[[], tuple[float, float]]) -> dict[str, float]:
    """Launch ranks, and return seconds to the first allreduce, of ``init``, and of CPU time."""
    cpu = _cpu_of_children()
    started = time.time()
    found = LocalBackend(ranks).run(connect)
    return {
        "to the first allreduce": max(reached for _, reached in found) - started,
        "init alone": statistics.median(init for init, _ in found),
        "CPU time": _cpu_of_children() - cpu,
    }


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + time.process_time()


class Simulation:
    """Processes whose threads act as ranks or tasks, and start together."""

    def __init__(self, act: Callable[..., None], number: int, *arguments: Any) -> None:
        # Processes that are forked could inherit locks of this process's threads.
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(PROCESSES + 1, timeout=LIMIT)
        shares = [range(first, number, PROCESSES) for first in range(PROCESSES)]
        self._processes = [
            context.Process(target=_act, args=(act, share, self._barrier, *arguments))
            for share in shares
        ]
        for process in self._processes:
            process.start()
        self._barrier.wait()

    def seconds(self) -> float:
        """Start, and return the seconds until all ranks have done."""
        started = time.perf_counter()
        self._barrier.wait()
        self._barrier.wait()
        taken = time.perf_counter() - started
        for process in self._processes:
            process.join()
            assert process.exitcode == 0
        return taken


def _act(act: Callable[..., None], share: Sequence[int], barrier: Any, *arguments: Any) -> None:
    # Each real task has its own process. Here, collections would visit the objects of all tasks.
    gc.disable()
    with ThreadPoolExecutor(len(share)) as pool:
        ready = threading.Barrier(len(share) + 1, timeout=LIMIT)

        def start(number: int) -> None:
            ready.wait()
            act(number, *arguments)

        running = [pool.submit(start, number) for number in share]
        barrier.wait()
        barrier.wait()
        ready.wait()
        for one in running:
            one.result()
    barrier.wait()


def replay(rank: int, ranks: int, endpoint: tuple[str, int], secret: bytes) -> None:
    """Send a rank's messages of all scopes, and check the addresses that Gloo would read."""
    own = b"".join(_address(rank, other) for other in range(ranks) if other != rank)
    with RemoteRendezvousClient(endpoint, secret, rank, "host") as client:
        keys = GlooKeys(client, ranks)
        for scope, previous in zip(SCOPES, (None, *SCOPES), strict=False):
            keys.request("PUT", scope, str(rank), own)
            # Gloo gets each value twice. One of all values is enough to compare.
            other = (rank + 1) % ranks
            status, value = 404, b""
            while status == 404:
                status, value = keys.request("GET", scope, str(other), b"")
            start = ADDRESS_BYTES * (rank - (rank > other))
            assert value[start : start + ADDRESS_BYTES] == _address(other, rank)
            # Gloo deletes its key after a barrier. All ranks have passed the previous scope.
            if previous is not None:
                keys.request("DELETE", previous, str(rank), b"")


def _address(rank: int, other: int) -> bytes:
    return f"{rank}>{other}".encode().ljust(ADDRESS_BYTES, b"\0")


def rendezvous(ranks: int) -> dict[str, float]:
    """Return seconds, messages and bytes of a rendezvous of simulated ranks."""
    secret = new_secret()
    counts: Counter[str] = Counter()
    with RendezvousServer(secret, ["127.0.0.1"], num_clients=ranks) as server:
        handle = server.store.handle

        def counting(message: Any, body: bytes = b"") -> Any:
            answer, reply = handle(message, body)
            if message["kind"] != "alive":
                counts["messages"] += 1
                counts["bytes"] += len(body) + len(reply)
            return answer, reply

        server.store.handle = counting  # type: ignore[method-assign]
        server.store.expect(["host"] * ranks)
        server.listen("127.0.0.1")
        taken = Simulation(replay, ranks, ranks, server.endpoints[0], secret).seconds()
    return {"seconds": taken, **counts}


def exchange_once(task: int, tasks: int, address: str, message: str) -> None:
    """Take part in an exchange as one task, and check the answer in one task per process."""
    sent = {**json.loads(message), "task": task}
    with connect_to_driver(address) as channel:
        channel.send({"kind": "events"})
        request = {"kind": "exchange", "task": task, "host": "host"}
        channel.send(request, json.dumps(sent).encode())
        reply, body = channel.receive(LIMIT)
    assert reply["complete"]
    if task < PROCESSES:
        assert unpacked(body) == [{**sent, "task": other} for other in range(tasks)]


def exchange(tasks: int) -> float:
    """Return the seconds in which simulated tasks exchange a message of a usual size."""
    message = {
        "host": {"name": "ip-10-0-0-1.internal", "addresses": ["10.0.0.1"], "ports": [40001]},
        "versions": {name: "1.2.3" for name in ("horovod", "torch", "tensorflow", "pyarrow")},
        "gpus": ["GPU-5f0a7a52-1b7c-4c4a-9b0e-000000000000"],
    }
    server = ExchangeServer(tasks, "application", lambda stage: None)
    with (
        DriverService("127.0.0.1", tasks) as service,
        receive_events(service, print, {"exchange": server.answer}),
        server,
    ):
        arguments = tasks, service.address, json.dumps(message)
        return Simulation(exchange_once, tasks, *arguments).seconds()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, help="ignored: there is no data")
    arguments.add_argument("--repeats", type=int, default=3, help="launches; the median counts")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16, 32])
    arguments.add_argument("--simulated", type=int, nargs="+", default=[100, 300, 1000])
    options = arguments.parse_args()
    records: list[Record] = []
    figures: dict[str, Any] = {"real": {}, "simulated": {}}
    for ranks in options.ranks:
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for name, connect in CONTENDERS.items():
            launch(ranks, connect)  # the first imports modules
            measured[name] = [launch(ranks, connect) for _ in range(options.repeats)]
        figures["real"][ranks] = measured
        for title in ("to the first allreduce", "init alone", "CPU time"):
            each = {name: [one[title] for one in found] for name, found in measured.items()}
            table = f"seconds {title} by ranks"
            records += compared(table, each, "s", TCP_STORE, at=ranks, middle=True)
    for ranks in options.simulated:
        found = [rendezvous(ranks) for _ in range(options.repeats)]
        exchanged = [exchange(ranks) for _ in range(options.repeats)]
        figures["simulated"][ranks] = {"rendezvous": found, "exchange": exchanged}
        taken = {"rendezvous": [one["seconds"] for one in found], "exchange": exchanged}
        records += compared("seconds by simulated ranks", taken, "s", at=ranks, middle=True)
        for unit in ("messages", "bytes"):
            per_rank = {"rendezvous": [one[unit] / ranks for one in found]}
            table = f"{unit} per rank by simulated ranks"
            records += compared(table, per_rank, unit, at=ranks, middle=True)
    for table in dict.fromkeys(record.table for record in records):
        of_table = [record for record in records if record.table == table]
        rows = [[one.at, one.name, one.value] for one in of_table]
        show_table(table, ["ranks", "", of_table[0].unit], rows)
    settings = {name: value for name, value in vars(options).items() if name != "rows"}
    show_result("ranks", settings, figures, records)


if __name__ == "__main__":
    main()
