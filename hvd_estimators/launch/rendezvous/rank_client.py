"""Client of the rendezvous in a rank's process, for keys that any program may use.

Requests go to the proxy in the rank's parent (`hvd_estimators.launch.rendezvous.gloo_http`), which
forwards them over the job's authenticated connection. Imports no framework.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from typing import Any

from hvd_estimators.launch.rendezvous.channel import MessageError
from hvd_estimators.launch.timeouts import Patience
from hvd_estimators.launch.versions import TOKEN_VARIABLE

PROXY_ADDRESS_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
"""Environment variable of Horovod: the address of the rank's proxy."""

PROXY_PORT_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_PORT"
"""Environment variable of Horovod: the port of the rank's proxy."""

KEYS_SCOPE = "keys"
"""First part of the path of each request of `RankClient`."""

JOINED = "joined"
"""Kind of the request that reports that the rank is connected to the others."""

_OK, _BAD_REQUEST = 200, 400


class RankClient:
    """Client for the rank's proxy. Runs in the rank.

    Parameters
    ----------
    address : str
        The proxy's address.
    port : int
        The proxy's port.
    token : str
        The bearer token that the proxy expects.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        self._endpoint = address, port
        self._headers = {"Authorization": f"Bearer {token}"}

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> RankClient | None:
        """Return the client for a rank's environment; None if another launcher started the rank."""
        if TOKEN_VARIABLE not in env:
            return None
        return cls(env[PROXY_ADDRESS_VARIABLE], int(env[PROXY_PORT_VARIABLE]), env[TOKEN_VARIABLE])

    def request(self, kind: str, body: bytes = b"", **values: Any) -> tuple[dict[str, Any], bytes]:
        """Send a message, and return the values and the bytes of its answer.

        Raises
        ------
        MessageError
            If the rendezvous does not know the message.
        ConnectionError
            If the task of rank 0 cannot be reached.
        """
        patience = Patience()
        # The proxy itself retries for this time.
        seconds = patience.silence + 2 * patience.attempt
        connection = http.client.HTTPConnection(*self._endpoint, timeout=seconds)
        try:
            head = json.dumps(values).encode()
            path = f"/{KEYS_SCOPE}/{kind}"
            connection.request("POST", path, head + b"\n" + body, self._headers)
            answer = connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"The rank's parent sent no answer: {error!r}.") from error
        finally:
            connection.close()
        if answer.status == _BAD_REQUEST and content:
            raise MessageError(content.decode(errors="replace"))
        if answer.status != _OK:
            raise ConnectionError(
                f"The rendezvous in the task of rank 0 cannot be reached (status {answer.status})."
            )
        head, _, content = content.partition(b"\n")
        return json.loads(head), content
