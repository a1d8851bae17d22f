"""Package versions on driver and ranks, and the patches that Horovod needs.

``hvd-estimators build-horovod`` applies the patches (`hvd_estimators.commands.source_patches`).

Ranks unpickle objects from the driver, and the driver reads files that ranks save. Different
versions fail late, with messages that do not mention versions. Runs on both sides; imports no
framework.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Mapping

import hvd_estimators

ADDRESS_VARIABLE = "HVD_ESTIMATORS_GLOO_ADDRESS"
"""Environment variable with the numeric address on which a rank's Gloo listens."""

TOKEN_VARIABLE = "HVD_ESTIMATORS_RENDEZVOUS_TOKEN"
"""Environment variable with a rank's bearer token for the rendezvous server."""

PATCHES_REVISION = 4
"""Revision that a wheel records in `MARKER`; increment it if a patch changes a wheel."""

REQUIRED_PATCHES = 1
"""Minimum revision that ranks need. Revision 2 lets Horovod detect stalled ranks."""

MARKER = "horovod/hvd_estimators_mends.py"
"""File that marks a wheel as compiled with the patches."""


_PACKAGES = (
    *("cloudpickle", "horovod", "keras", "lightning", "pyarrow", "pytorch-lightning"),
    *("tensorflow", "torch"),
)


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that must be equal on both sides.

    Build suffixes (``+cpu``) are removed, because a driver may not have GPUs.
    """
    versions = {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "hvd_estimators": hvd_estimators.__version__,
    }
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def differences(here: Mapping[str, str], driver: Mapping[str, str]) -> str:
    """Describe how a machine's versions differ from the driver's; empty if they match.

    A package that only one side has is ignored. Not all jobs need it, and a missing package reports
    itself.
    """
    different = [
        f"{name} {version} where the driver has {driver[name]}"
        for name, version in here.items()
        if driver.get(name, version) != version
    ]
    if not different:
        return ""
    return (
        f"has {', '.join(different)}. Install the same versions on all machines, or give executors "
        "the driver's environment (spark.archives, or PYSPARK_PYTHON with a Python that all share)."
    )
