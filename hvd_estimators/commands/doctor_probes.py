"""What the doctor looks at: versions, imports, a real allreduce, GPUs.

Nothing here judges what it finds: `hvd_estimators.commands.doctor` does.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from hvd_estimators.commands.build_redirect import installed_horovod_spark
from hvd_estimators.commands.build_tools import DISTRIBUTIONS, cuda_of, installed_version
from hvd_estimators.commands.doctor_processes import ProbeError, run_python, two_rank_allreduce
from hvd_estimators.launch.mends import installed_mends

__all__ = ["Facts", "HorovodFacts", "collect"]

# Component as shown, and the distributions that may bring it, the first found counting.
_COMPONENTS = {
    "pyspark": ("pyspark", "pyspark-connect", "pyspark-client"),
    "pyarrow": ("pyarrow",),
    "numpy": ("numpy",),
    "petastorm": ("petastorm",),
    **DISTRIBUTIONS,
    "keras": ("keras",),
    "lightning": ("pytorch-lightning", "lightning"),
    "horovod": ("horovod",),
}

_IMPORTED = {"petastorm": "petastorm.reader", "torch": "torch", "tensorflow": "tensorflow"}

_HOROVOD_SCRIPT = """\
import json
import horovod.{framework} as hvd
print(json.dumps({{name: bool(getattr(hvd, name + "_built")()) for name in {features}}}))
"""
_HOROVOD_FEATURES = ("gloo", "mpi", "nccl", "cuda")

_IMPORT_SECONDS = 120.0
_ALLREDUCE_SECONDS = 120.0


@dataclass(frozen=True)
class HorovodFacts:
    """Horovod's support for one framework.

    Parameters
    ----------
    built_for : str or None
        The framework's version that the wheel was compiled against.
    features : tuple of str
        Those of gloo, mpi, nccl and cuda that it was built with.
    error : str or None
        Why it cannot be imported.
    """

    built_for: str | None = None
    features: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """What was found on this machine.

    Parameters
    ----------
    python : str
        Python's version.
    java : str or None
        Version of the Java that PySpark would start.
    versions : mapping of str to str
        Version of each installed component.
    import_errors : mapping of str to str
        What each installed component that cannot be imported says last.
    horovod : mapping of str to HorovodFacts
        Per installed framework; empty without Horovod.
    horovod_mends : int
        Revision of the changes that Horovod was compiled with; 0 without them.
    horovod_spark : str or None
        What ``horovod.spark`` is, see `installed_horovod_spark`.
    allreduce : float or ProbeError or None
        Seconds that two ranks took to start and reduce, or why they did not; None if not tried.
    gpus : tuple of str
        Names of NVIDIA GPUs.
    torch_cuda : bool
        Whether torch was built for CUDA.
    """

    python: str
    java: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    import_errors: Mapping[str, str] = field(default_factory=dict)
    horovod: Mapping[str, HorovodFacts] = field(default_factory=dict)
    horovod_mends: int = 0
    horovod_spark: str | None = None
    allreduce: float | ProbeError | None = None
    gpus: tuple[str, ...] = ()
    torch_cuda: bool = False


def collect() -> Facts:
    """Look at this machine; takes some seconds, most of them importing frameworks."""
    found = {name: installed_version(*names) for name, names in _COMPONENTS.items()}
    versions = {name: version for name, version in found.items() if version}
    frameworks = [name for name in DISTRIBUTIONS if name in versions]
    with ThreadPoolExecutor(max_workers=2) as pool:
        imports = {
            name: pool.submit(_import_error, module)
            for name, module in _IMPORTED.items()
            if name in versions
        }
        horovod = {
            name: pool.submit(_horovod_facts, name) for name in frameworks if "horovod" in versions
        }
    builds = {name: future.result() for name, future in horovod.items()}
    works = next((name for name, build in builds.items() if build.error is None), None)
    return Facts(
        python=platform.python_version(),
        java=_java_version(),
        versions=versions,
        import_errors={name: text for name, future in imports.items() if (text := future.result())},
        horovod=builds,
        horovod_mends=installed_mends(),
        horovod_spark=installed_horovod_spark(),
        allreduce=_try_allreduce(works) if works else None,
        gpus=_gpus(),
        torch_cuda="torch" in versions and cuda_of("torch") is not None,
    )


def _try_allreduce(framework: str) -> float | ProbeError:
    try:
        return two_rank_allreduce(framework, seconds=_ALLREDUCE_SECONDS)
    except ProbeError as error:
        return error


def _import_error(module: str) -> str | None:
    try:
        run_python("-c", f"import {module}", seconds=_IMPORT_SECONDS, what=f"import {module}")
    except ProbeError as error:
        return str(error)
    return None


def _horovod_facts(framework: str) -> HorovodFacts:
    script = _HOROVOD_SCRIPT.format(framework=framework, features=_HOROVOD_FEATURES)
    built_for = _built_for(framework)
    try:
        what = f"import horovod.{framework}"
        answer = run_python("-c", script, seconds=_IMPORT_SECONDS, what=what)
    except ProbeError as error:
        return HorovodFacts(built_for, error=str(error))
    return HorovodFacts(
        built_for, tuple(name for name, built in json.loads(answer).items() if built)
    )


def _built_for(framework: str) -> str | None:
    """Return the version that Horovod's build noted down in its package."""
    note = Path(str(metadata.distribution("horovod").locate_file("horovod/metadata.json")))
    if not note.is_file():
        return None
    versions = json.loads(note.read_text())
    version: str | None = versions.get({"torch": "pytorch"}.get(framework, framework))
    return version


def _java_version() -> str | None:
    """Return the version of the Java that PySpark starts: JAVA_HOME's, else the one on PATH."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    if java is None:
        return None
    done = subprocess.run([java, "-version"], capture_output=True, text=True)
    found = re.search(r'version "([^"]+)"', done.stderr + done.stdout)
    return found.group(1) if found else None


def _gpus() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return ()
    done = subprocess.run(command, capture_output=True, text=True)
    return tuple(done.stdout.split("\n")[:-1]) if done.returncode == 0 else ()
