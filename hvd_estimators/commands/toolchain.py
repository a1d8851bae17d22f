"""Toolchain of a Horovod build: frameworks, compiler, CUDA, build tools, and the recipe.

Horovod's last release, 0.28.1, is older than today's frameworks and does not compile against them
unchanged. Four problems are solved outside its source; `hvd_estimators.commands.horovod_source`
fixes errors in the source:

* Its CMake files request C++14, but frameworks need C++17, and torch 2.13 needs C++20. They also
  remove ``-std=`` from ``CXXFLAGS``. A wrapper script around the compiler therefore appends the
  standard last.
* ``xla_mpi_ops.cc`` includes XLA headers that TensorFlow 2.18 moved. The script hides TensorFlow
  from this file, whose operations are for GPUs only and off by default.
* CMake 4 rejects its minimum CMake version; ``CMAKE_POLICY_VERSION_MINIMUM`` overrides it.
* It uses headers of the C++ library that g++ before 13 included implicitly. The script includes
  them first.

Framework versions come from package metadata. Frameworks are never imported, because an import
takes seconds and would hold GPU memory while the compiler runs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from packaging.tags import sys_tags
from packaging.version import Version

from hvd_estimators._util.install_hints import INSTALL_A_FRAMEWORK
from hvd_estimators._util.system import available_cores
from hvd_estimators.exceptions import BuildError, DependencyError
from hvd_estimators.launch.horovod_build import DISTRIBUTIONS, REVISION, cuda_of, installed_version

HOROVOD_VERSION = "0.28.1"

SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Hash of the source distribution of `HOROVOD_VERSION` on PyPI."""

# Horovod's and Gloo's sources use these headers without including them.
_CXX_HEADERS = ("cstdint", "stdexcept", "string")

_WRAPPER = """\
#!/bin/sh
# Runs the C++ compiler; only Horovod's own sources (*.cc) get the flags that fix its build.
extra=
for argument in "$@"; do
    case "$argument" in
{cases}
    esac
done
exec {compiler} "$@" $extra
"""

NCCL_LIBRARY = "libnccl.so.2"
"""File name of NCCL's shared library, as ranks load it."""

_CUDA_FOLDER = Path("/usr/local/cuda")

_MEMORY_PER_COMPILER = 1.5 * 2**30  # bytes; torch's headers under g++ 12 take a little less


@dataclass(frozen=True)
class BuildRecipe:
    """Versions that a Horovod wheel is built for, and the resulting build settings.

    Parameters
    ----------
    tag : str
        The interpreter's most specific wheel tag, as returned by ``packaging.tags``.
    torch, tensorflow : str or None
        The installed versions; None if the framework is not installed.
    cuda : str or None
        The CUDA version to build for; None builds for CPUs.
    compat : bool
        Whether ``horovod.spark`` is `hvd_estimators.compat`. Otherwise it raises an ImportError
        that names the replacements.
    horovod : str
        Horovod's version.
    """

    tag: str
    torch: str | None = None
    tensorflow: str | None = None
    cuda: str | None = None
    compat: bool = False
    horovod: str = HOROVOD_VERSION

    @property
    def key(self) -> str:
        """Name of the cache folder; two builds share it exactly if their wheels are the same."""
        parts = [f"horovod-{self.horovod}", self.tag]
        parts += [f"{name}-{version}" for name, version in self.versions.items()]
        parts.append(f"cuda-{self.cuda}" if self.cuda else "cpu")
        if self.compat:
            parts.append("compat")
        parts.append(f"r{REVISION}")
        return "_".join(parts)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the frameworks, by the name of Horovod's module for it."""
        found = {"torch": self.torch, "tensorflow": self.tensorflow}
        return {name: version for name, version in found.items() if version}

    @property
    def version(self) -> str:
        """Version of the wheel: Horovod's, and a label of what it was built for.

        Labels of equal frameworks and devices are ordered by their revisions. The label of a wheel
        with this package's ``horovod.spark`` starts with ``compat``, which sorts below the others.
        So pip installs such a wheel only if its version is requested exactly.
        """
        label = ["compat"] if self.compat else []
        label += [f"{name}{Version(version).public}" for name, version in self.versions.items()]
        label.append(f"cu{self.cuda.replace('.', '')}" if self.cuda else "cpu")
        return str(Version(f"{self.horovod}+{'.'.join([*label, str(REVISION)])}"))

    def record(self) -> dict[str, Any]:
        """Return the record of a wheel, as plain values."""
        return {
            "horovod": self.horovod,
            "version": self.version,
            "torch": self.torch,
            "tensorflow": self.tensorflow,
            "cuda": self.cuda,
            "compat": self.compat,
            "revision": REVISION,
            "requires": [
                f"{_distribution(framework)}=={Version(version).public}"
                for framework, version in self.versions.items()
            ],
        }

    @property
    def cxx_standard(self) -> int:
        """The C++ standard that the frameworks' headers require."""
        return 20 if _at_least(self.torch, "2.13") else 17

    def environment(
        self, *, cxx: str, jobs: int, cuda_home: str | None = None, nccl_home: str | None = None
    ) -> dict[str, str]:
        """Return the environment variables of the build, to be added to the caller's environment.

        Parameters
        ----------
        cxx : str
            Path of a script with the text from `compiler_wrapper`.
        jobs : int
            Number of compilers to run in parallel.
        cuda_home : str or None
            The CUDA toolkit's folder, for a CUDA build.
        nccl_home : str or None
            A folder with NCCL's ``include`` and a shared library in ``lib``, for a CUDA build.
            By default Horovod searches the system's folders.
        """
        variables = {
            "CXX": cxx,
            "MAKEFLAGS": f"-j{jobs}",
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            f"HOROVOD_WITH{'' if self.torch else 'OUT'}_PYTORCH": "1",
            f"HOROVOD_WITH{'' if self.tensorflow else 'OUT'}_TENSORFLOW": "1",
        }
        if self.cuda:
            variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
            if cuda_home:
                # Otherwise torch, which Horovod queries for libraries, uses the folder above
                # nvcc's.
                variables |= {"HOROVOD_CUDA_HOME": cuda_home, "CUDA_HOME": cuda_home}
            if nccl_home:
                variables["HOROVOD_NCCL_INCLUDE"] = f"{nccl_home}/include"
                variables["HOROVOD_NCCL_LIB"] = f"{nccl_home}/lib"
                variables["HOROVOD_NCCL_LINK"] = "SHARED"
        return variables

    def compiler_wrapper(self, compiler: str) -> str:
        """Return the text of the shell script that wraps `compiler`.

        Parameters
        ----------
        compiler : str
            The C++ compiler as a shell would run it: a path, or a command such as ``ccache g++``.
        """
        # Without debug symbols the build is faster and the wheel smaller. Warnings of a released
        # package are not useful, and hide the errors in the log.
        headers = " ".join(f"-include {name}" for name in _CXX_HEADERS)
        flags = f"-std=gnu++{self.cxx_standard} -g0 -w {headers}"
        cases = [f'        *.cc) extra="{flags}" ;;']
        if _at_least(self.tensorflow, "2.18"):
            # This file must be compiled as if TensorFlow were absent.
            hide = f"{flags} -UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=0"
            cases.insert(0, f'        *xla_mpi_ops.cc) extra="{hide}" ;;')
        return _WRAPPER.format(cases="\n".join(cases), compiler=compiler)


def _at_least(version: str | None, minimum: str) -> bool:
    return version is not None and Version(version).release >= Version(minimum).release


def detect_recipe(gpu: str = "auto", compat: bool = False) -> BuildRecipe:
    """Return the recipe of a Horovod for the frameworks in this interpreter's environment.

    Parameters
    ----------
    gpu : {'auto', 'none', 'cuda'}
        ``auto`` builds for CUDA if the framework was built with it and a CUDA toolkit is found.
    compat : bool
        Whether ``horovod.spark`` is `hvd_estimators.compat`.

    Raises
    ------
    DependencyError
        If neither torch nor TensorFlow is installed.
    BuildError
        If ``gpu`` is ``cuda``, and the framework or the machine lacks CUDA.
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
        compat=compat,
    )


def _distribution(framework: str) -> str:
    """Return the installed distribution that provides a framework."""
    names = DISTRIBUTIONS[framework]
    return next((name for name in names if installed_version(name)), names[0])


def _choose_cuda(gpu: str, versions: dict[str, str | None]) -> str | None:
    if gpu == "none":
        return None
    # One wheel serves both frameworks. Its torch part cannot be compiled for CUDA against a CPU
    # build of torch, so torch decides if it is installed.
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


def find_cuda_toolkit() -> Path | None:
    """Return the folder of a CUDA toolkit with a compiler and headers, or None.

    The candidates are ``HOROVOD_CUDA_HOME``, ``CUDA_HOME``, the toolkit of the ``nvcc`` on PATH,
    and ``/usr/local/cuda``, in this order. An ``nvcc`` on PATH may be a link, or a script outside
    of a toolkit.
    """
    named = [Path(h) for h in map(os.environ.get, ("HOROVOD_CUDA_HOME", "CUDA_HOME")) if h]
    on_path = [Path(path) for path in [shutil.which("nvcc")] if path]
    homes = [path.parent.parent for nvcc in on_path for path in (nvcc, nvcc.resolve())]
    return next(filter(_is_cuda_toolkit, [*named, *homes, _CUDA_FOLDER]), None)


def _is_cuda_toolkit(folder: Path) -> bool:
    headers = [folder / "include", *folder.glob("targets/*/include")]
    has_headers = any((path / "cuda_runtime.h").is_file() for path in headers)
    return has_headers and (folder / "bin" / "nvcc").is_file()


def find_nccl(cuda: str) -> Path | None:
    """Return the folder of the NCCL package that torch installs.

    Returns None if the package is not installed, or if ``HOROVOD_NCCL_HOME`` or a similar variable
    names another NCCL.

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
    """Return the C++ compiler's command: ``$CXX`` if it is set, else g++.

    Raises
    ------
    BuildError
        If there is no compiler.
    """
    program, *options = shlex.split(os.environ.get("CXX") or "g++")
    path = shutil.which(program)
    if path is None:
        raise BuildError(
            f"No C++ compiler found (looked for {program}). Install one, on Debian or Ubuntu "
            "with apt-get install g++ make python3-dev, or name it with CXX."
        )
    return shlex.join([path, *options])


def missing_build_packages() -> list[str]:
    """Return the Python packages that Horovod's build needs and this environment lacks."""
    modules = {"setuptools": "setuptools", "wheel": "wheel", "cffi": "cffi", "patch_ng": "patch-ng"}
    missing = [package for module, package in modules.items() if find_spec(module) is None]
    if not shutil.which("cmake", path=build_path()):
        missing.append("cmake")
    return missing


def build_path(*first: Path) -> str:
    """Return a PATH that starts with `first` and with the scripts of this environment.

    A virtual environment's interpreter can run without activation, so the environment's scripts may
    not be on PATH.
    """
    scripts = Path(sys.executable).parent
    return os.pathsep.join([*map(str, first), str(scripts), os.environ.get("PATH", os.defpath)])


def default_jobs() -> int:
    """Return the number of parallel compilers that this machine's cores and free memory allow."""
    by_memory = int(psutil.virtual_memory().available // _MEMORY_PER_COMPILER)
    return max(1, min(available_cores(), by_memory))
