"""Collectives for Python objects, authenticated with the job's key.

Horovod's ``broadcast_object`` and ``allgather_object`` unpickle the data that they receive, which
can run code. The connections between ranks are not authenticated. The messages of this module
carry an authentication code over their content, their name, their sender and their sequence number.
The code uses the job's key, which ranks find in their environment.
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

from hvd_estimators._util.unpickle_imports import loads
from hvd_estimators.launch.rendezvous.channel import RANKS_KEY_VARIABLE

Bytes = npt.NDArray[np.uint8]

_TAG_BYTES = 32
_LENGTH_BYTES = 8


class ObjectExchange:
    """Gathers and broadcasts objects over a framework's collectives. Every rank must create one.

    Parameters
    ----------
    rank, size : callable
        Return the number of this rank and the number of ranks.
    gather : callable
        Called with bytes and a name; returns the concatenated bytes of all ranks.
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
        """All-gather one object per rank, and return them in the order of the ranks."""
        return [loads(part) for part in self._parts(cloudpickle.dumps(value), name)]

    def broadcast(self, value: Any, name: str, root: int = 0) -> Any:
        """Return the object of the root rank on all ranks."""
        own = cloudpickle.dumps(value) if self._rank() == root else b""
        document = self._parts(own, name)[root]
        return value if self._rank() == root else loads(document)

    def _parts(self, document: bytes, name: str) -> list[bytes]:
        message = f"{name} {self._counts[name]}"
        self._counts[name] += 1
        length = len(document).to_bytes(_LENGTH_BYTES, "little")
        sealed = np.frombuffer(length + _tag(message, self._rank(), document) + document, np.uint8)
        gathered = self._gather(sealed, f"{name}.bytes").tobytes()
        parts: list[bytes] = []
        start = 0
        for rank in range(self._size()):
            length = gathered[start : start + _LENGTH_BYTES]
            content_start = start + _LENGTH_BYTES + _TAG_BYTES
            tag = gathered[start + _LENGTH_BYTES : content_start]
            start = content_start + int.from_bytes(length, "little")
            content = gathered[content_start:start]
            # A changed length selects different content, whose code does not match.
            if not hmac.compare_digest(tag, _tag(message, rank, content)):
                raise ConnectionError(
                    f"The message of rank {rank} is not authenticated by this job's key, and was "
                    "rejected. Another program has a connection to this rank."
                )
            parts.append(content)
        return parts


def _tag(message: str, rank: int, document: bytes) -> bytes:
    # Ranks that another program starts (horovodrun) have no key and trust their connections.
    key = os.environ.get(RANKS_KEY_VARIABLE, "").encode()
    code = hmac.new(key, f"{message} {rank} ".encode(), "sha256")
    code.update(document)
    return code.digest()
