"""What the machine offers to a build of Horovod: frameworks, compiler, CUDA, build tools.

Frameworks are asked for their metadata and never imported: that would take seconds, and would
hold a GPU's memory while the compiler runs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.tags import sys_tags

from hvd_estimators.commands.build_recipe import BuildRecipe
from hvd_estimators.exceptions import BuildError, DependencyError
from hvd_estimators.remedies import INSTALL_A_FRAMEWORK

__all__ = [
    "DISTRIBUTIONS",
    "GPU_CHOICES",
    "NCCL_LIBRARY",
    "build_path",
    "check_system",
    "cuda_of",
    "default_jobs",
    "detect_recipe",
    "find_compiler",
    "find_cuda_toolkit",
    "find_nccl",
    "installed_version",
    "missing_build_packages",
]

GPU_CHOICES = ("auto", "none", "cuda")

NCCL_LIBRARY = "libnccl.so.2"
"""File name of NCCL's shared library, as ranks load it."""

# TensorFlow is distributed under several names; all of them install the module `tensorflow`.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"),
}

# Where a framework's wheel writes down the CUDA version that it was built with.
_CUDA_NOTES = {
    "torch": ("version.py", r"^cuda\b.*?=\s*'([\d.]+)'"),
    "tensorflow": ("python/platform/build_info.py", r"'cuda_version', '([\d.]+)'"),
}

_CUDA_FOLDER = Path("/usr/local/cuda")
_MEMORY_PER_COMPILER = 1.5 * 2**30  # bytes; torch's headers under g++ 12 take a little less


def detect_recipe(gpu: str = "auto") -> BuildRecipe:
    """Return the recipe of a Horovod for the frameworks installed beside this interpreter.

    Parameters
    ----------
    gpu : {'auto', 'none', 'cuda'}
        ``auto`` builds for CUDA if the framework was built with it and a CUDA toolkit is found.

    Raises
    ------
    DependencyError
        Neither torch nor TensorFlow is installed.
    BuildError
        ``cuda`` was asked for, and the framework or the machine is without it.
    """
    versions = {name: installed_version(*names) for name, names in DISTRIBUTIONS.items()}
    if not any(versions.values()):
        raise DependencyError(
            f"Horovod is built for an installed framework; {sys.executable} has neither torch nor "
            f"tensorflow. Install one first: {INSTALL_A_FRAMEWORK}"
        )
    return BuildRecipe(
        tag=str(next(sys_tags())),
        torch=versions["torch"],
        tensorflow=versions["tensorflow"],
        cuda=_choose_cuda(gpu, versions),
    )


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of `distributions` that is installed."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _choose_cuda(gpu: str, versions: dict[str, str | None]) -> str | None:
    if gpu not in GPU_CHOICES:
        raise ValueError(f"gpu must be one of {', '.join(GPU_CHOICES)}, not {gpu!r}")
    if gpu == "none":
        return None
    # One wheel serves both frameworks, and its torch part cannot be compiled for CUDA against a
    # CPU torch, so torch decides where it is installed.
    framework = "torch" if versions["torch"] else "tensorflow"
    cuda = cuda_of(framework)
    toolkit = find_cuda_toolkit()
    if gpu == "cuda" and cuda is None:
        raise BuildError(
            f"A CUDA build was asked for, but {framework} {versions[framework]} is built for CPUs. "
            f"Install a CUDA build of {framework}, or use --gpu none."
        )
    if gpu == "cuda" and toolkit is None:
        raise BuildError(
            "A CUDA build was asked for, but no CUDA toolkit (bin/nvcc and include/cuda_runtime.h) "
            "was found in CUDA_HOME, around the nvcc on PATH, or in /usr/local/cuda. Install the "
            f"CUDA toolkit {cuda} and set CUDA_HOME to its folder, or use --gpu none."
        )
    return cuda if toolkit else None


def cuda_of(framework: str) -> str | None:
    """Return the CUDA version that an installed framework was built with; None without CUDA."""
    spec = find_spec(framework)
    if spec is None or not spec.submodule_search_locations:
        return None
    file_name, pattern = _CUDA_NOTES[framework]
    note = Path(spec.submodule_search_locations[0], file_name)
    found = re.search(pattern, note.read_text(), re.MULTILINE) if note.is_file() else None
    return found.group(1) if found else None


def find_cuda_toolkit() -> Path | None:
    """Return the folder of a CUDA toolkit with a compiler and headers; None if there is none.

    It is that of ``HOROVOD_CUDA_HOME`` or ``CUDA_HOME``, that of the ``nvcc`` on PATH, or
    ``/usr/local/cuda``. An ``nvcc`` on PATH may be a link, or a script beside no toolkit.
    """
    named = [Path(h) for h in map(os.environ.get, ("HOROVOD_CUDA_HOME", "CUDA_HOME")) if h]
    on_path = [Path(path) for path in [shutil.which("nvcc")] if path]
    homes = [path.parent.parent for found in on_path for path in (found, found.resolve())]
    return next(filter(_is_cuda_toolkit, [*named, *homes, _CUDA_FOLDER]), None)


def _is_cuda_toolkit(folder: Path) -> bool:
    headers = [folder / "include", *folder.glob("targets/*/include")]
    has_headers = any((path / "cuda_runtime.h").is_file() for path in headers)
    return has_headers and (folder / "bin" / "nvcc").is_file()


def find_nccl(cuda: str) -> Path | None:
    """Return the folder of the NCCL that torch brings along, a package of its own.

    None where there is none, or where ``HOROVOD_NCCL_HOME`` and the like name another.

    Parameters
    ----------
    cuda : str
        The CUDA version of the build.
    """
    if any(os.environ.get(f"HOROVOD_NCCL_{part}") for part in ("HOME", "INCLUDE", "LIB")):
        return None
    try:
        package = metadata.distribution(f"nvidia-nccl-cu{cuda.partition('.')[0]}")
    except metadata.PackageNotFoundError:
        return None
    folder = Path(str(package.locate_file("nvidia/nccl")))
    complete = (folder / "include/nccl.h").is_file() and (folder / "lib" / NCCL_LIBRARY).is_file()
    return folder if complete else None


def find_compiler() -> str:
    """Return the C++ compiler's command: ``$CXX`` where it is set, else g++, c++ or clang++.

    Raises
    ------
    BuildError
        There is none.
    """
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for command in candidates:
        program = shutil.which(shlex.split(command)[0])
        if program:
            return shlex.join([program, *shlex.split(command)[1:]])
    raise BuildError(
        f"No C++ compiler found (looked for {', '.join(candidates)}). "
        "On Debian or Ubuntu: apt-get install g++"
    )


def check_system(recipe: BuildRecipe, compiler: str) -> None:
    """Raise `BuildError` if something is missing that only the system's packages can bring."""
    if not shutil.which("make"):
        raise BuildError("No make found. On Debian or Ubuntu: apt-get install make")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        raise BuildError(
            f"Python's C headers are not installed ({header} does not exist). "
            "On Debian or Ubuntu: apt-get install python3-dev"
        )
    standard = f"-std=gnu++{recipe.cxx_standard}"
    trial = subprocess.run(
        [*shlex.split(compiler), standard, "-x", "c++", "-fsyntax-only", "-"],
        input="#include <vector>\n",
        text=True,
        capture_output=True,
    )
    if trial.returncode:
        raise BuildError(
            f"{compiler} cannot compile C++{recipe.cxx_standard}, which the headers of torch "
            f"{recipe.torch} and TensorFlow {recipe.tensorflow} need; it said:\n"
            f"{trial.stderr.strip()}\nInstall g++ 11 or newer, or name another compiler with CXX."
        )


def missing_build_packages() -> list[str]:
    """Return the Python packages that Horovod's build needs and this environment lacks."""
    missing = [name for name in ("setuptools", "wheel", "cffi") if find_spec(name) is None]
    if not shutil.which("cmake", path=build_path()):
        missing.append("cmake")
    return missing


def build_path(*first: Path) -> str:
    """Return a PATH that starts with `first` and with the scripts of this environment.

    A virtual environment's interpreter runs without the environment being activated, so its
    scripts need not be on PATH.
    """
    scripts = Path(sys.executable).parent
    return os.pathsep.join([*map(str, first), str(scripts), os.environ.get("PATH", os.defpath)])


def default_jobs() -> int:
    """Return how many compilers this machine's cores and free memory can run at the same time."""
    by_memory = int(psutil.virtual_memory().available // _MEMORY_PER_COMPILER)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, by_memory))
