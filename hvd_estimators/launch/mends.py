"""What ranks need of Horovod that its release lacks, and whether the installed one has it.

``hvd-estimators build-horovod`` puts it in (`hvd_estimators.commands.build_mends`).
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from hvd_estimators.exceptions import DependencyError
from hvd_estimators.remedies import BUILD_HOROVOD

__all__ = [
    "ADDRESS_VARIABLE",
    "MARKER",
    "MENDS_REVISION",
    "REQUIRED_MENDS",
    "TOKEN_VARIABLE",
    "installed_mends",
    "require_mends",
]

ADDRESS_VARIABLE = "HVD_ESTIMATORS_GLOO_ADDRESS"
"""Environment variable with the numeric address on which a rank's Gloo listens."""

TOKEN_VARIABLE = "HVD_ESTIMATORS_RENDEZVOUS_TOKEN"
"""Environment variable with what a rank shows the rendezvous server, as a bearer token."""

MENDS_REVISION = 2
"""What a wheel says of itself in `MARKER`; raise it when a mend changes what a wheel does."""

REQUIRED_MENDS = 1
"""The revision without which ranks do not run. The second lets Horovod notice stalled ranks."""

MARKER = "horovod/hvd_estimators_mends.py"
"""The file by which a wheel tells that it was compiled with the mends."""


def installed_mends() -> int:
    """Return the revision of the mends of the installed Horovod; 0 without them, or without it.

    Imports nothing of Horovod.
    """
    spec = find_spec("horovod")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        marker = Path(place) / Path(MARKER).name
        if marker.is_file():
            found = re.search(r"^REVISION = (\d+)$", marker.read_text(), re.MULTILINE)
            return int(found.group(1)) if found else 0
    return 0


def require_mends() -> None:
    """Make sure that the installed Horovod was compiled with the mends.

    Raises
    ------
    DependencyError
        If it was not.
    """
    if installed_mends() < REQUIRED_MENDS:
        raise DependencyError(
            "The installed Horovod was built without the changes that ranks need: they choose the "
            "address on which they listen, and prove to the rendezvous server who they are. "
            f"Build it anew on every machine: {BUILD_HOROVOD}"
        )
