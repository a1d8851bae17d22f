"""Keys of ``torch.distributed`` in the job's authenticated rendezvous. Runs in the rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from hvd_estimators.launch.rendezvous.client import RankClient

_OK = 200

# The module does not declare its names for type checkers.
_distributed: Any = torch.distributed


class RendezvousStore(_distributed.Store):
    """Store over the rendezvous of the job, see ``torch.distributed.Store``.

    It has what process groups use, and not ``compare_set``, ``num_keys`` and the extended API.

    Parameters
    ----------
    client : RankClient
        The rank's client of the rendezvous.
    seconds : float
        Default time to wait for keys of other ranks.
    """

    def __init__(self, client: RankClient, seconds: float = 300.0) -> None:
        super().__init__()
        self._client = client
        self._limit = timedelta(seconds=seconds)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value."""
        self._client.request("set", _as_bytes(value), key=key)

    def get(self, key: str) -> bytes:
        """Return a key's value; wait until the key exists."""
        return self._await([key], self._limit)

    def add(self, key: str, value: int) -> int:
        """Add to a key's number, which starts at 0, and return the sum."""
        _, total = self._client.request("add", key=key, amount=value)
        return int(total)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist, without waiting."""
        return self._values(keys, 0.0) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises
        ------
        DistStoreError
            If they do not exist in time.
        """
        self._await(keys, self._limit if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        answer, _ = self._client.request("delete", key=key)
        return bool(answer["existed"])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time to wait for keys."""
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        """Default time to wait for keys."""
        return self._limit

    # torch's C++ code calls the method by another name.
    deleteKey = delete_key

    def _await(self, keys: Sequence[str], limit: timedelta) -> bytes:
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            values = self._values(keys, max(deadline - time.monotonic(), 0.0))
            if values is not None:
                return values
            if time.monotonic() >= deadline:
                raise torch.distributed.DistStoreError(
                    f"wait timeout after {limit.total_seconds():g} s, keys: {', '.join(keys)}"
                )

    def _values(self, keys: Sequence[str], seconds: float) -> bytes | None:
        """Return the values of keys, joined; None if some do not exist within some seconds."""
        answer, values = self._client.request("get", keys=list(keys), seconds=seconds)
        return values if answer["status"] == _OK else None


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
