"""The installed build of Horovod: what it was built for, and whether it fits this environment.

A wheel of ``hvd-estimators build-horovod`` records what it was built for in `BUILD_FILE`. That file
also checks each import of ``horovod.torch`` and ``horovod.tensorflow``, with the source of
`difference`. This module reads files and package metadata only. It imports neither Horovod nor a
framework. Runs on driver and ranks.
"""

from __future__ import annotations

import ast
import functools
import re
import threading
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvd_estimators._util.install_hints import BUILD_HOROVOD
from hvd_estimators.exceptions import DependencyError

REVISION = 7
"""Revision of the build, which a wheel records, and the minimum that ranks need. Increment it if a
change of the build, such as a patch, changes the wheel for the same versions."""

BUILD_FILE = "horovod/hvd_estimators_build.py"
"""File of a wheel with the record of what it was built for."""

_parsing = threading.Lock()

BUILD_VARIABLE = "BUILD"
"""Variable of `BUILD_FILE` with the record, a dict of plain values."""

# TensorFlow is distributed under several names; all of them install the module `tensorflow`.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"),
}
"""Module of each framework to the distributions that may provide it."""

TITLES = {"torch": "torch", "tensorflow": "TensorFlow"}
"""Module of each framework to its name in messages."""

# The file of each framework with the CUDA version of its build, and a pattern for the version.
_CUDA_NOTES = {
    "torch": ("version.py", r"^cuda\b.*?=\s*'([\d.]+)'"),
    "tensorflow": ("python/platform/build_info.py", r"'cuda_version', '([\d.]+)'"),
}


# The wheel contains the source of this function, so that it may use nothing outside of itself.
def difference(
    build: Mapping[str, Any], framework: str, installed: str, cuda: str | None
) -> str | None:
    """Return how an installed framework differs from the one that Horovod was built for.

    Parameters
    ----------
    build : mapping
        The record of the build.
    framework : {'torch', 'tensorflow'}
        The framework's module.
    installed : str
        The framework's installed version.
    cuda : str or None
        The CUDA version that the framework was built with.

    Returns
    -------
    str or None
        A sentence without its end, or None if they fit each other.
    """
    title = {"tensorflow": "TensorFlow"}.get(framework, framework)
    built = build.get(framework)
    if built is None:
        return f"this Horovod was built without {title}"
    if built.partition("+")[0] != installed.partition("+")[0]:
        return f"this Horovod was built for {title} {built}, installed is {installed}"
    # The torch part of a CUDA build needs torch's CUDA libraries; TensorFlow's does not.
    built_cuda = build.get("cuda") if framework == "torch" else None
    if built_cuda and (cuda or "").partition(".")[0] != built_cuda.partition(".")[0]:
        found = f"built for CUDA {cuda}" if cuda else "built for CPUs"
        return (
            f"this Horovod was built for {title} {built} with CUDA {built_cuda}, installed is "
            f"{title} {installed}, {found}"
        )
    return None


def is_horovod_installed() -> bool:
    """Return whether this Python can import a Horovod, of any build."""
    return bool(horovod_folders())


def installed_record() -> dict[str, Any]:
    """Return the record of the installed Horovod; empty if it has none, or without Horovod."""
    for folder in horovod_folders():
        record = folder / Path(BUILD_FILE).name
        if record.is_file():
            return read_record(record.read_text())
    return {}


@functools.cache
def read_record(text: str) -> dict[str, Any]:
    """Return the record in the text of a `BUILD_FILE` file, without running it."""
    record = text.partition(f"{BUILD_VARIABLE} = ")[2].partition("\n\n")[0]
    # Concurrent fits of a grid check their build. CPython up to 3.11.7 and 3.12.1 may raise
    # SystemError if two threads parse (python/cpython#106905).
    with _parsing:
        return dict(ast.literal_eval(record))


def describe_build(record: Mapping[str, Any]) -> str:
    """Return a record's frameworks, their versions and the device, for messages."""
    named = [f"{title} {record[name]}" for name, title in TITLES.items() if record.get(name)]
    device = f"CUDA {record['cuda']}" if record.get("cuda") else "CPU"
    return ", ".join([" and ".join(named) or "no framework", device])


def installed_revision() -> int:
    """Return the revision of the installed Horovod's build; 0 if this package did not build it."""
    return int(installed_record().get("revision", 0))


def installed_horovod_spark() -> str | None:
    """Return the kind of the installed ``horovod.spark``, without importing Horovod.

    Returns
    -------
    str or None
        ``"compat"``: the names of this package; ``"off"``: an ImportError; ``"frozen"``: the
        package of 2023; None: Horovod is not installed.
    """
    if not is_horovod_installed():
        return None
    if not installed_revision():
        return "frozen"
    return "compat" if installed_record()["compat"] else "off"


def require_patches() -> None:
    """Check that an installed Horovod was compiled with the patches; see `patches_problem`.

    Raises
    ------
    DependencyError
        If it was not.
    """
    problem = patches_problem()
    if problem:
        raise DependencyError(problem)


def patches_problem() -> str:
    """Return why ranks cannot use an installed Horovod without the patches; empty if they can.

    Programs that do not use Horovod run without it, so a missing Horovod is no problem.
    """
    if not is_horovod_installed() or installed_revision() >= REVISION:
        return ""
    return (
        "The installed Horovod was built without the changes that ranks need to choose the "
        "address on which they listen, and to authenticate with the rendezvous server. "
        f"Build it again on every machine: {BUILD_HOROVOD}"
    )


def horovod_problem(framework: str) -> str | None:
    """Return why the installed Horovod cannot serve a framework; None if it can.

    Parameters
    ----------
    framework : {'torch', 'tensorflow'}
        The framework's module.

    Returns
    -------
    str or None
        A sentence without its end.
    """
    if not is_horovod_installed():
        return "Horovod is not installed"
    if installed_revision() < REVISION:
        return "this Horovod was built without the patches that ranks need"
    installed = installed_version(*DISTRIBUTIONS[framework])
    if installed is None:
        return f"{TITLES[framework]} is not installed"
    return difference(installed_record(), framework, installed, cuda_of(framework))


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of `distributions` that is installed."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def cuda_of(framework: str) -> str | None:
    """Return the CUDA version that an installed framework was built with; None without CUDA."""
    spec = find_spec(framework)
    if spec is None or not spec.submodule_search_locations:
        return None
    file_name, pattern = _CUDA_NOTES[framework]
    note = Path(spec.submodule_search_locations[0], file_name)
    match = re.search(pattern, note.read_text(), re.MULTILINE) if note.is_file() else None
    return match.group(1) if match else None


def horovod_folders() -> list[Path]:
    """Return the folders of the installed Horovod; empty without Horovod."""
    spec = find_spec("horovod")
    folders = map(Path, (spec.submodule_search_locations or ()) if spec else ())
    # Any folder of this name is a namespace package, such as a clone in the working directory.
    return [folder for folder in folders if (folder / "__init__.py").is_file()]
