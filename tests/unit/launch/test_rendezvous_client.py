"""A task's link to the server of rank 0, which survives short outages of the network."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hvd_estimators.launch.rendezvous.channel import new_secret
from hvd_estimators.launch.rendezvous.client import PeerLostError, RemoteRendezvousClient
from hvd_estimators.launch.rendezvous.server import Failure, RendezvousServer
from hvd_estimators.launch.timeouts import Patience

pytestmark = pytest.mark.timeout(60)

SECRET = new_secret()
PATIENCE = Patience(attempt=0.3, refused=0.6, silence=1.5, pause=0.02, beat=0.05)
PLACE = {"scope": "global", "key": "0"}
KEYS = {"scope": "global", "keys": ["0"]}


@contextlib.contextmanager
def served(addresses=("127.0.0.1",), ranks=2, patience=PATIENCE):
    with RendezvousServer(SECRET, addresses, patience) as server:
        server.store.expect([f"host-{rank}" for rank in range(ranks)])
        server.listen(addresses[0])
        yield server


def link_to(endpoint, rank=1, secret=SECRET, patience=PATIENCE):
    return RemoteRendezvousClient(endpoint, secret, rank, "host-0", patience)


def eventually(condition):
    while not condition():
        time.sleep(0.01)
    return condition()


def test_one_rank_reads_keys_of_another():
    with (
        served() as server,
        link_to(server.endpoints[0]) as one,
        link_to(server.endpoints[0], 0) as two,
    ):
        assert one.request("set", b"\0value", **PLACE)[0]["status"] == 200
        assert two.request("get", **KEYS) == ({"status": 200}, b"\0value")


def test_other_tasks_learn_the_rank_host_and_cause_of_a_failure():
    with (
        served(ranks=3) as server,
        link_to(server.endpoints[0], 1) as failing,
        link_to(server.endpoints[0], 2) as other,
    ):
        failing.notify("failed", host="host-1", why="had failed (ValueError: no)")
        failure = eventually(other.failure)
    assert failure == Failure(1, "host-1", "had failed (ValueError: no)")


def test_a_message_that_cannot_be_handled_counts_as_the_loss_of_its_rank():
    with served() as server, link_to(server.endpoints[0]) as link:
        link.request("set", b"no number", **PLACE)
        with pytest.raises(PeerLostError):
            link.request("add", amount=1, **PLACE)
        failure = eventually(server.store.failure)
        assert (failure.rank, failure.lost) == (1, True)
        server.store.handle({"kind": "done", "rank": 0})
        server.store.wait_for_all()


def test_a_listener_goes_on_after_threads_could_not_be_started(monkeypatch):
    failed = threading.Event()
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.endswith("(_run)") and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with served() as server:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with socket.create_connection(server.endpoints[0], timeout=10) as refused:
            assert refused.recv(1) == b""
        assert failed.is_set()
        with link_to(server.endpoints[0]) as link:
            assert link.notify("alive")


def test_the_server_listens_only_on_demand_and_at_one_address():
    with RendezvousServer(SECRET, ["127.0.0.1", "127.0.0.2"], PATIENCE) as server:
        for endpoint in server.endpoints:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(endpoint)
        server.listen("127.0.0.2")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.endpoints[0])
        with link_to(server.endpoints[1]) as link:
            assert link.notify("alive")
        # The machine's other addresses do not answer either.
        host = socket.gethostbyname_ex(socket.gethostname())[2]
        for address in {*host, "127.0.0.3"} - {"127.0.0.1", "127.0.0.2"}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, server.endpoints[1][1]))


def test_a_silent_server_is_reported_after_the_silence_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 0 on host-0 has not answered for 2 s"):
            link_to(silent.getsockname()).request("alive")
        assert 1.2 < time.monotonic() - started < 10


class Cable:
    """A relay to a server that can be cut: it stops forwarding but refuses no connection."""

    def __init__(self, target):
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = self._server.getsockname()
        self._up = threading.Event()
        self._up.set()
        self._sockets = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self._up.clear()

    def mend(self):
        self._up.set()

    def close(self):
        for one in self._sockets:
            one.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self._server.accept()
                outer = socket.create_connection(self._target)
                self._sockets += [inner, outer]
                for source, sink in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._up.wait()
                sink.sendall(data)
            self._up.wait()
            sink.shutdown(socket.SHUT_WR)


def cable_to(server):
    return contextlib.closing(Cable(server.endpoints[0]))


def test_an_outage_shorter_than_the_silence_limit_is_survived():
    with served() as server, cable_to(server) as cable, link_to(cable.endpoint) as link:
        link.notify("alive")
        cable.cut()
        threading.Timer(1.0, cable.mend).start()
        started = time.monotonic()
        assert link.notify("failed", host="host-1", why="had failed")
        assert time.monotonic() - started > 0.9
        assert server.store.failure() == Failure(1, "host-1", "had failed")
        assert eventually(link.failure) == server.store.failure()


def test_a_lasting_outage_ends_the_job_on_both_sides():
    with served() as server, cable_to(server) as cable, link_to(cable.endpoint) as link:
        link.notify("alive")
        server.store.handle({"kind": "done", "rank": 0})
        cable.cut()
        assert server.store.wait_for_all() == [1]
        assert server.store.failure().why == "has not been heard of for 1.5 s"
        assert "has not answered for" in eventually(link.failure).why
        cable.mend()


_SERVER_PROGRAM = """
import sys
from hvd_estimators.launch.timeouts import Patience
from hvd_estimators.launch.rendezvous.server import RendezvousServer
secret = bytes.fromhex(sys.stdin.readline())
with RendezvousServer(secret, ["127.0.0.1"], Patience(0.3, 0.6, 1.5, 0.02, 0.05)) as server:
    server.store.expect(["host-0", "host-1"])
    server.listen("127.0.0.1")
    print(server.endpoints[0][1], flush=True)
    server.store.handle({"kind": "done", "rank": 0})
    lost = server.store.wait_for_all()
    print(lost, server.store.failure(), flush=True)
    # Not before the last answer has been sent.
    sys.stdin.read()
"""


def test_a_temporarily_stopped_rank_0_is_survived():
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER_PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write(f"{SECRET.hex()}\n")
        process.stdin.flush()
        endpoint = ("127.0.0.1", int(process.stdout.readline()))
        with link_to(endpoint, patience=Patience(1.0, 2.0, 8.0, 0.02, 0.05)) as link:
            link.notify("alive")
            os.kill(process.pid, signal.SIGSTOP)
            # Longer than the server lets ranks be silent; its clock stands still meanwhile.
            threading.Timer(2.0, os.kill, (process.pid, signal.SIGCONT)).start()
            assert link.request("set", b"v", **PLACE)[0]["status"] == 200
            assert link.request("get", **KEYS)[1] == b"v"
            assert link.failure() is None
            assert link.notify("done")
        assert process.stdout.readline() == "[] None\n"
        process.stdin.close()
        assert process.wait(10) == 0


def test_a_task_that_ends_without_a_word_is_lost_after_the_silence_limit():
    with served() as server:
        with link_to(server.endpoints[0]) as link:
            link.notify("alive")
        started = time.monotonic()
        server.store.handle({"kind": "done", "rank": 0})
        assert server.store.wait_for_all() == [1]
        assert time.monotonic() - started > 1.2
        assert server.store.failure().why == "has not been heard of for 1.5 s"


def test_a_task_that_never_connects_is_lost_after_the_silence_limit():
    with served() as server:
        server.store.handle({"kind": "done", "rank": 0})
        assert server.store.wait_for_all() == [1]
        assert server.store.failure().why == "has not been heard of for 1.5 s"


def test_ranks_may_save_their_state_although_the_task_of_rank_0_has_ended():
    with served() as server, cable_to(server) as cable, link_to(cable.endpoint) as link:
        link.request("alive")
        started = time.monotonic()
        cable.close()
        eventually(lambda: not link.notify("alive"))
        failure = eventually(link.failure)
        assert time.monotonic() - started > 1.2
    assert (failure.rank, failure.lost) == (0, True)
    assert "has closed its connection" in failure.why


def test_a_broken_connection_is_the_loss_of_rank_0():
    with served() as server:
        handle = server.store.handle

        def breaks(message, body=b""):
            handle(message, body)
            raise ConnectionResetError

        with link_to(server.endpoints[0]) as link:
            link.request("alive")
            server.store.handle = breaks
            failure = eventually(link.failure)
            with pytest.raises(PeerLostError, match="rank 0 on host-0 has"):
                link.request("alive")
    assert (failure.rank, failure.host, failure.lost) == (0, "host-0", True)
