"""Package versions on driver and ranks, and the patches that Horovod needs.

``hvd-estimators build-horovod`` applies the patches (`hvd_estimators.commands.source_patches`).

Ranks unpickle objects from the driver, and the driver reads files that ranks save. Different
versions fail late, with messages that do not mention versions. Runs on both sides; imports no
framework.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import hvd_estimators
from hvd_estimators._util.install_hints import BUILD_HOROVOD
from hvd_estimators.exceptions import DependencyError

__all__ = [
    "ADDRESS_VARIABLE",
    "MARKER",
    "PATCHES_REVISION",
    "REQUIRED_PATCHES",
    "TOKEN_VARIABLE",
    "check_builds",
    "differences",
    "horovod_build",
    "installed_patches",
    "installed_versions",
    "require_patches",
]

ADDRESS_VARIABLE = "HVD_ESTIMATORS_GLOO_ADDRESS"
"""Environment variable with the numeric address on which a rank's Gloo listens."""

TOKEN_VARIABLE = "HVD_ESTIMATORS_RENDEZVOUS_TOKEN"
"""Environment variable with a rank's bearer token for the rendezvous server."""

PATCHES_REVISION = 3
"""Revision that a wheel records in `MARKER`; increment it if a patch changes a wheel."""

REQUIRED_PATCHES = 1
"""Minimum revision that ranks need. Revision 2 lets Horovod detect stalled ranks."""

MARKER = "horovod/hvd_estimators_mends.py"
"""File that marks a wheel as compiled with the patches."""


def installed_patches() -> int:
    """Return the patch revision of the installed Horovod; 0 without patches or without Horovod.

    Does not import Horovod.
    """
    for folder in _horovod_folders():
        marker = folder / Path(MARKER).name
        if marker.is_file():
            revision = re.search(r"^REVISION = (\d+)$", marker.read_text(), re.MULTILINE)
            return int(revision.group(1)) if revision else 0
    return 0


def require_patches() -> None:
    """Check that the installed Horovod was compiled with the patches.

    Raises
    ------
    DependencyError
        If it was not.
    """
    if installed_patches() < REQUIRED_PATCHES:
        raise DependencyError(
            "The installed Horovod was built without the changes that ranks need to choose the "
            "address on which they listen, and to authenticate with the rendezvous server. "
            f"Build it again on every machine: {BUILD_HOROVOD}"
        )


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


@functools.cache
def horovod_build() -> str:
    """Return the fingerprint of the installed build of Horovod, computed from its files."""
    digest = hashlib.sha256(installed_versions().get("horovod", "").encode())
    for folder in _horovod_folders():
        libraries = [*folder.glob("torch/mpi_lib*.so"), *folder.glob("tensorflow/mpi_lib*.so")]
        for path in sorted(libraries):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
    return digest.hexdigest()[:12]


def _horovod_folders() -> list[Path]:
    spec = find_spec("horovod")
    return list(map(Path, (spec.submodule_search_locations or ()) if spec else ()))


def check_builds(hosts: Sequence[str], builds: Sequence[str]) -> None:
    """Check that all ranks have the same build of Horovod.

    If only some builds have NCCL, ranks would wait for each other indefinitely.

    Parameters
    ----------
    hosts, builds : sequence of str
        The host of each task, and the result of `horovod_build` there; empty if it was not called.

    Raises
    ------
    DependencyError
        If the builds differ.
    """
    of_builds: dict[str, list[str]] = defaultdict(list)
    for host, build in zip(hosts, builds, strict=True):
        if build and host not in of_builds[build]:
            of_builds[build].append(host)
    if len(of_builds) > 1:
        groups = "; ".join(f"{build} on {', '.join(of)}" for build, of in of_builds.items())
        raise DependencyError(
            f"The ranks have different builds of Horovod: {groups}. Install one wheel on all "
            f"machines: {BUILD_HOROVOD}"
        )
