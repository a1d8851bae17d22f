"""Keys of a rank's Gloo, answered from memory. Runs in the rank's parent."""

from __future__ import annotations

from hvd_estimators.launch.rendezvous.channel import MessageError
from hvd_estimators.launch.rendezvous.client import RendezvousClient

# The scope that connects all ranks. Horovod connects it first.
_GLOBAL_SCOPE = "global_"

_OK, _NOT_FOUND = 200, 404


class GlooKeys:
    """Keys of one rank's Gloo: one request per scope fetches the values of all other ranks.

    In each scope, Gloo puts one value per rank: its addresses for the other ranks, in order, all of
    equal length (``gloo/rendezvous/context.cc`` in Horovod 0.28). Each rank then gets the values of
    all others, each twice, and reads only its own address in them. N ranks with one message per
    request would send 2 N^2 messages, and 272 N^3 bytes. So only the own address is fetched of each
    value, and the rest of the value that Gloo gets is zero.

    Gloo also puts the ranks' host names, in keys that are not numbers, and does not use them over
    TCP. They are not sent.

    Parameters
    ----------
    client : RendezvousClient
        The client to which requests are forwarded.
    size : int
        Number of ranks of the job.
    """

    def __init__(self, client: RendezvousClient, size: int) -> None:
        self._client = client
        self._size = size
        self._address_bytes: int | None = None
        self._own_keys: dict[str, tuple[int, int]] = {}
        self._addresses: dict[str, bytes] = {}

    def request(self, method: str, scope: str, key: str, content: bytes) -> tuple[int, bytes]:
        """Answer a request with a status and bytes.

        Raises
        ------
        PeerLostError
            If the rendezvous cannot be reached.
        MessageError
            If it does not answer as Gloo needs, such as that of another version.
        """
        if not key.isdecimal():
            return (_NOT_FOUND if method == "GET" else _OK), b""
        if method == "GET":
            return self._get(scope, int(key))
        if method == "PUT":
            self._own_keys[scope] = int(key), len(content)
            if scope == _GLOBAL_SCOPE and self._size > 1:
                self._address_bytes = len(content) // (self._size - 1)
        self._addresses.pop(scope, None)
        kind = "put" if method == "PUT" else "delete"
        answer, body = self._client.request(kind, content, scope=scope, key=key)
        return int(answer["status"]), body

    def _get(self, scope: str, key: int) -> tuple[int, bytes]:
        own, num_bytes = self._own_keys.get(scope, (-1, 0))
        length = self._address_bytes
        if not length or not num_bytes or num_bytes % length or key == own:
            # This is not the Gloo described above.
            answer, value = self._client.request("get", scope=scope, key=str(key))
            return int(answer["status"]), value
        addresses = self._addresses.get(scope)
        if addresses is None:
            count = num_bytes // length + 1
            answer, addresses = self._client.request(
                "get_parts", scope=scope, key=str(own), count=count
            )
            if answer["status"] != _OK:
                return int(answer["status"]), b""
            if len(addresses) != length * (count - 1):
                raise MessageError(
                    f"Rank 0 sent {len(addresses)} bytes for {count - 1} addresses of {length} "
                    f"bytes in Gloo's scope {scope!r}."
                )
            self._addresses[scope] = addresses
        place = length * (key - (key > own))
        address = addresses[place : place + length]
        start = length * (own - (own > key))
        return _OK, bytes(start) + address + bytes(num_bytes - start - length)
