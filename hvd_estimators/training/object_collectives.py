"""Objects sent between ranks, accepted only from senders that prove to be ranks of the job.

Horovod's own ``broadcast_object`` and ``allgather_object`` run what they receive (pickle), and the
connections between ranks prove nothing. Ours carry an authentication code over their content, their
name and their place in the job's order. It is made with the job's key, which ranks have in their
environment.
"""

from __future__ import annotations

import collections
import hmac
import os
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from hvd_estimators._util.unpickling import loads
from hvd_estimators.launch.rendezvous.channel import RANKS_KEY_VARIABLE

__all__ = ["ObjectExchange"]

Bytes = npt.NDArray[np.uint8]

_TAG_BYTES = 32
_LENGTH_BYTES = 8


class ObjectExchange:
    """Gathers and broadcasts objects over a framework's collectives. Every rank makes one.

    Parameters
    ----------
    rank, size : callable
        Return the number of this rank, and how many there are.
    gather : callable
        Called with bytes and a name; returns the bytes of all ranks, one after the other.
    """

    def __init__(
        self,
        rank: Callable[[], int],
        size: Callable[[], int],
        gather: Callable[[Bytes, str], Bytes],
    ) -> None:
        self._rank = rank
        self._size = size
        self._gather = gather
        self._counts: collections.Counter[str] = collections.Counter()

    def gather(self, value: Any, name: str) -> list[Any]:
        """Return an object of every rank, in the order of the ranks."""
        return [loads(part) for part in self._parts(cloudpickle.dumps(value), name)]

    def broadcast(self, value: Any, name: str, root: int = 0) -> Any:
        """Return an object of one rank on all ranks."""
        own = cloudpickle.dumps(value) if self._rank() == root else b""
        document = self._parts(own, name)[root]
        return value if self._rank() == root else loads(document)

    def _parts(self, document: bytes, name: str) -> list[bytes]:
        place = f"{name} {self._counts[name]}"
        self._counts[name] += 1
        length = len(document).to_bytes(_LENGTH_BYTES, "little")
        sealed = np.frombuffer(length + _tag(place, self._rank(), document) + document, np.uint8)
        whole = self._gather(sealed, f"{name}.bytes").tobytes()
        parts: list[bytes] = []
        start = 0
        for rank in range(self._size()):
            begin = start + _LENGTH_BYTES + _TAG_BYTES
            tag = whole[start + _LENGTH_BYTES : begin]
            start = begin + int.from_bytes(whole[start : start + _LENGTH_BYTES], "little")
            content = whole[begin:start]
            # A length that somebody has changed makes another content.
            if not hmac.compare_digest(tag, _tag(place, rank, content)):
                raise ConnectionError(
                    f"What came as rank {rank}'s does not prove to be of this job, and was "
                    "not used. Somebody else has a connection to this rank."
                )
            parts.append(content)
        return parts


def _tag(place: str, rank: int, document: bytes) -> bytes:
    # Ranks that something else starts (horovodrun) have no key and trust their connections.
    key = os.environ.get(RANKS_KEY_VARIABLE, "").encode()
    code = hmac.new(key, f"{place} {rank} ".encode(), "sha256")
    code.update(document)
    return code.digest()
