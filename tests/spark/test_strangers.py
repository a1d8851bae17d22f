"""Unauthorized requests, from the same machine, to every port of a running job."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_estimators.launch.service.events import RankOutput
from hvd_estimators.launch.spark_backend import SparkBackend

pytestmark = [pytest.mark.spark, pytest.mark.once]

PATHS = ["/global/0", "/global_process_set/1", "/keys/set"]
METHODS = ("GET", "PUT", "DELETE", "POST")
SAID = [
    *(
        f"{method} {path} HTTP/1.1\r\n{header}Content-Length: 0\r\n\r\n".encode()
        for method in METHODS
        for path in PATHS
        for header in ("", "Authorization: Bearer 0000\r\n")
    ),
    b'{"kind": "failed", "rank": 1, "host": "there", "why": "lied"}\n',
    b"\0" * 300,
    b"",
]


def listening() -> set[int]:
    """Return the ports that this process and Python processes below it listen on.

    Spark's own daemon, which starts the others, does not count.
    """
    found: set[int] = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if "java" in (process.name(), parent and parent.name()):
                continue
            places = process.net_connections(kind="inet")
            found |= {p.laddr.port for p in places if p.status == psutil.CONN_LISTEN}
    return found


def answer(port: int, said: bytes, seconds: float = 10) -> bytes:
    """Return everything that a port sends, until it closes the connection or stays silent."""
    received = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as asking:
        asking.sendall(said)
        asking.shutdown(socket.SHUT_WR)
        asking.settimeout(seconds)
        while part := asking.recv(4096):
            received += part
    return received


@pytest.mark.parametrize("library", ["horovod", "torch"])
def test_unauthorized_requests_are_rejected_and_the_job_succeeds(
    spark: Any, tmp_path: Path, library: str
) -> None:
    before = listening()

    def work(folder: str) -> float:
        from hvd_estimators.torch.collectives import session, sum_over_ranks

        with session(library) as ranks:
            # The ranks' parent process is not a child of the test's process.
            places = psutil.Process().net_connections(kind="inet")
            ports = {p.laddr.port for p in places if p.status == psutil.CONN_LISTEN}
            partial = Path(folder, f"{ranks.rank}.partial")
            partial.write_text(" ".join(map(str, ports)))
            partial.rename(partial.with_suffix(".ready"))
            while not Path(folder, "go on").exists():
                time.sleep(0.02)
            total = sum_over_ranks(ranks.rank + 1.0)
        # The ranks connect again, after the strangers have written to their rendezvous keys.
        with session(library) as ranks:
            print("rank", ranks.rank)
            return total + sum_over_ranks(ranks.rank + 1.0)

    heard: list[Any] = []
    results: list[Any] = []

    def run() -> None:
        backend = SparkBackend(2, verbose=2)
        results.append(backend.run(work, (str(tmp_path),), on_event=heard.append))

    job = threading.Thread(target=run)
    job.start()
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("*.ready"))) < 2:
        assert time.monotonic() < deadline
        assert job.is_alive()
        time.sleep(0.05)

    ports = listening() - before
    # One proxy per rank, rank 0's server, and the driver's event server.
    assert len(ports) >= 4
    of_gloo = {int(port) for file in tmp_path.glob("*.ready") for port in file.read_text().split()}
    # Horovod's Gloo closes its ports once the ranks are connected.
    assert len(of_gloo) == (2 if library == "torch" else 0)
    answers = [answer(port, said) for port in ports for said in SAID]
    # Torch's Gloo sends no answer, and keeps strangers waiting.
    assert {answer(port, said, 0.1) for port in of_gloo for said in SAID} <= {b""}
    (tmp_path / "go on").touch()
    job.join(60)

    refused = [found for found in answers if found.startswith(b"HTTP/1.1 401")]
    # Two proxies speak HTTP and reject every request that they can parse.
    assert len(refused) == 2 * len(METHODS) * len(PATHS) * 2
    # All others send a random challenge, or nothing, and close the connection.
    assert {len(found) for found in answers if found not in refused} <= {0, 32}
    assert results == [[6.0, 6.0]]
    lines = [event for event in heard if isinstance(event, RankOutput)]
    assert sorted(event.line for event in lines) == ["rank 0\n", "rank 1\n"]
