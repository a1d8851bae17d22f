"""What a rank tells the process that started it. Runs on the worker."""

from __future__ import annotations

import http.client
import os
import time

from hvd_estimators.launch.versions import TOKEN_VARIABLE

__all__ = ["JOB_SCOPE", "tell_parent"]

JOB_SCOPE = "hvd_estimators"
"""Scope of the keys that are not Horovod's."""

_PATIENCE_SECONDS = 60.0
_ATTEMPT_SECONDS = 10.0
_PAUSE_SECONDS = 0.2


def tell_parent(word: str) -> None:
    """Tell the parent ``joined`` or ``left``; do nothing if the parent is another backend.

    Repeated until it is answered, for a minute at most.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return
    host = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(host, port, timeout=_ATTEMPT_SECONDS)
        try:
            connection.request(
                "PUT", f"/{JOB_SCOPE}/{word}", headers={"Authorization": f"Bearer {token}"}
            )
            connection.getresponse().read()
            return
        except (OSError, http.client.HTTPException):
            time.sleep(_PAUSE_SECONDS)
        finally:
            connection.close()
