"""Notifications from a rank to its parent process. Runs on the worker."""

from __future__ import annotations

import http.client
import os
import time

from hvd_estimators.launch.versions import TOKEN_VARIABLE

__all__ = ["JOB_SCOPE", "tell_parent"]

JOB_SCOPE = "hvd_estimators"
"""Key scope of requests that are not Horovod's."""

_PATIENCE_SECONDS = 60.0
_ATTEMPT_SECONDS = 10.0
_PAUSE_SECONDS = 0.2


def tell_parent(word: str) -> None:
    """Send ``joined`` or ``left`` to the parent; do nothing if another backend started the rank.

    The request is repeated until it is answered, for at most a minute.
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
