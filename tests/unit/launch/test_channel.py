"""Authenticated messages; changed, cut or repeated ones are rejected."""

import contextlib
import socket
import threading
import time

import pytest
from fake_clock import set_clock
from hypothesis import given, settings
from hypothesis import strategies as st
from json_values import Effort, efforts, fuzz
from processes import in_thread

from hvd_estimators.launch.rendezvous import channel
from hvd_estimators.launch.rendezvous.channel import AuthenticationError, Channel, new_secret

pytestmark = pytest.mark.timeout(60)

SECRET = new_secret()


@contextlib.contextmanager
def pair(client_secret=SECRET, server_secret=SECRET, seconds=5.0):
    """Yield both ends of a connection; a rejected end is its error."""
    left, right = socket.socketpair()
    ends = {}

    def accept():
        try:
            ends["server"] = Channel.accept(right, server_secret, seconds)
        except OSError as error:
            ends["server"] = error
            right.close()

    thread = threading.Thread(target=accept)
    thread.start()
    with left, right:
        try:
            client = Channel.connect(left, client_secret, seconds)
        except OSError as error:
            client = error
            left.close()
        thread.join()
        yield client, ends["server"]


def test_messages_arrive_unchanged_in_both_directions():
    bodies = [b"", b"\n\n\0\xff", bytes(range(256)) * 500]
    with pair() as (client, server):
        for number, body in enumerate(bodies):
            client.send({"kind": "put", "number": number, "key": "größe\n"}, body)
            assert server.receive(1) == ({"kind": "put", "number": number, "key": "größe\n"}, body)
            server.send({"status": number}, body[::-1])
            assert client.receive(1) == ({"status": number}, body[::-1])


@pytest.mark.parametrize(
    "secret",
    [new_secret(), b"", SECRET[:-1], SECRET + b"1"],
    ids=["another", "none", "shorter", "longer"],
)
def test_the_server_rejects_another_secret_before_any_message(secret):
    with pair(client_secret=secret) as (client, server):
        assert isinstance(server, AuthenticationError)
        assert isinstance(client, ConnectionError)


def test_a_client_sends_no_message_to_a_server_without_the_secret():
    left, right = socket.socketpair()
    with left, right:
        right.sendall(b"n" * 32 + b"p" * 32)
        with pytest.raises(AuthenticationError):
            Channel.connect(left, SECRET, 5)
        right.settimeout(1)
        # A nonce and a proof that is worthless on any other connection.
        assert len(right.recv(1000)) == 64


class Wire:
    """A man in the middle that forwards and records bytes, and may change them."""

    def __init__(self, change=lambda direction, position, byte: byte):
        self.client, inner_client = socket.socketpair()
        inner_server, self.server = socket.socketpair()
        self.seen = {"up": bytearray(), "down": bytearray()}
        self._change = change
        self._inner = inner_client, inner_server
        self._threads = [
            threading.Thread(target=self._pass_on, args=("up", inner_client, inner_server)),
            threading.Thread(target=self._pass_on, args=("down", inner_server, inner_client)),
        ]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, direction, source, target):
        seen = self.seen[direction]
        while data := source.recv(65536):
            changed = bytes(
                self._change(direction, len(seen) + i, byte) for i, byte in enumerate(data)
            )
            seen += data
            with contextlib.suppress(OSError):
                target.sendall(changed)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self.client.close()
        self.server.close()
        for thread in self._threads:
            thread.join()
        for end in self._inner:
            end.close()


def exchange(wire):
    """Exchange one message and its answer over a wire; return the received messages."""
    taken = []

    def serve():
        with contextlib.suppress(OSError):
            server = Channel.accept(wire.server, SECRET, 0.5)
            taken.append(server.receive(0.5, 0.5))
            server.send({"status": 200}, b"answer")
        wire.server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    answer = None
    with contextlib.suppress(OSError):
        client = Channel.connect(wire.client, SECRET, 0.5)
        client.send({"kind": "put"}, b"value")
        answer = client.receive(0.5, 0.5)
    wire.client.close()
    thread.join()
    return taken, answer


ASKED, ANSWERED = ({"kind": "put"}, b"value"), ({"status": 200}, b"answer")


@given(st.sampled_from(["up", "down"]), st.integers(0, 130), st.integers(1, 255))
@settings(max_examples=25)
def test_a_message_with_any_byte_changed_is_rejected(direction, position, mask):
    def change(way, at, byte):
        return byte ^ mask if (way, at) == (direction, position) else byte

    wire = Wire(change)
    taken, answer = exchange(wire)
    wire.close()

    assert taken in ([], [ASKED])
    assert answer in (None, ANSWERED)
    assert (taken, answer) != ([ASKED], ANSWERED) or position >= len(wire.seen[direction])


def test_a_recorded_connection_cannot_be_replayed():
    wire = Wire()
    assert exchange(wire) == ([ASKED], ANSWERED)
    wire.close()

    left, right = socket.socketpair()
    with left, right:
        left.sendall(bytes(wire.seen["up"]))
        with pytest.raises(AuthenticationError):
            Channel.accept(right, SECRET, 5)


def test_a_message_repeated_on_its_connection_is_rejected():
    with pair() as (client, server):
        sent = []
        client._connection = Recorder(client._connection, sent)
        client.send({"kind": "put"})
        server.receive(1)
        client._connection.sendall(sent[0])
        with pytest.raises(AuthenticationError):
            server.receive(1)


class Recorder:
    def __init__(self, connection, sent):
        self._connection, self._sent = connection, sent

    def sendall(self, data):
        self._sent.append(data)
        self._connection.sendall(data)

    def __getattr__(self, name):
        return getattr(self._connection, name)


class Slow:
    """A connection that takes a second for each MiB, on a fake clock."""

    def __init__(self, connection, clock):
        self._connection, self._clock = connection, clock
        self._left = float("inf")

    def settimeout(self, seconds):
        self._left = seconds
        self._connection.settimeout(60)

    def sendall(self, data):
        self._pass(len(data))
        self._connection.sendall(data)

    def recv(self, count):
        data = self._connection.recv(count)
        self._pass(len(data))
        return data

    def recv_into(self, target):
        count = self._connection.recv_into(target)
        self._pass(count)
        return count

    def _pass(self, count):
        seconds = count / 2**20
        if seconds > self._left:
            raise TimeoutError("timed out")
        self._left -= seconds
        self._clock.now += seconds


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_limits_are_for_each_mebibyte_of_a_large_message(monkeypatch, end):
    body = bytes(9 * 2**20)
    with pair(seconds=60) as (client, server):
        clock = set_clock(monkeypatch, channel)
        slow = client if end == "sender" else server
        slow._connection = Slow(slow._connection, clock)
        before = clock.now
        sending = in_thread(lambda: client.send({"kind": "put"}, body, 3.0))
        assert server.receive(3, 3.0) == ({"kind": "put"}, body)
        sending.result(60)
        assert clock.now - before > 9


def test_a_large_body_is_sent_without_a_copy():
    body, sent = bytes(range(256)) * 2**14, []
    with pair() as (client, server):
        client._connection = Recorder(client._connection, sent)
        sending = in_thread(lambda: client.send({"kind": "put"}, body, 60))
        assert server.receive(60, 60) == ({"kind": "put"}, body)
        sending.result(60)
    shared = [part for part in sent if isinstance(part, memoryview)]
    assert all(part.obj is body for part in shared)
    assert sum(map(len, shared)) == len(body)
    assert sum(map(len, sent)) < len(body) + 100


def test_a_message_of_gigabytes_is_rejected_at_once():
    with pair() as (client, server):
        client._connection.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(AuthenticationError, match="4294967295 bytes"):
            server.receive(1)


def test_a_handshake_sent_byte_by_byte_times_out():
    left, right = socket.socketpair()
    stopped = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            while not stopped.wait(0.05):
                left.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    started = time.monotonic()
    with left, right:
        with pytest.raises(TimeoutError):
            Channel.accept(right, SECRET, 0.3)
        assert time.monotonic() - started < 2
        stopped.set()
        thread.join()


@pytest.mark.parametrize("effort", efforts(30))
def test_any_bytes_of_a_stranger_only_end_its_connection(effort: Effort) -> None:
    def check(content):
        for meet in (Channel.accept, Channel.connect):
            left, right = socket.socketpair()
            with left, right:
                left.sendall(content)
                left.shutdown(socket.SHUT_WR)
                with pytest.raises((ConnectionError, TimeoutError)):
                    meet(right, SECRET, 5.0)

    fuzz(check, st.binary(max_size=300), effort)


@pytest.mark.parametrize("effort", efforts(30))
def test_any_bytes_after_the_handshake_are_no_message(effort: Effort) -> None:
    def check(content):
        with pair() as (client, server):
            client._connection.sendall(content)
            client._connection.shutdown(socket.SHUT_WR)
            with pytest.raises((ConnectionError, TimeoutError)):
                server.receive(1, 1)

    fuzz(check, st.binary(max_size=300), effort)
