"""What a Horovod build needs for given versions: pure functions of a frozen value.

Horovod's last release, 0.28.1, is older than today's frameworks and does not compile against
them as it stands. Four things stop it, and each is mended from outside its source (what is wrong
in the source itself is changed there by `hvd_estimators.commands.build_mends`):

* its CMake files ask for C++14, where torch 2.1 needs C++17 and torch 2.13 C++20, and they strip
  ``-std=`` from ``CXXFLAGS``: the compiler is wrapped in a script that appends the standard last;
* ``xla_mpi_ops.cc`` includes XLA headers that TensorFlow 2.18 moved: the script hides TensorFlow
  from that one file, whose operations are for GPUs only and off by default;
* its minimum CMake version is one that CMake 4 refuses: ``CMAKE_POLICY_VERSION_MINIMUM``;
* it uses headers of the C++ library that g++ before 13 included by the way: the script includes
  them first.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

__all__ = ["HOROVOD_VERSION", "BuildRecipe"]

HOROVOD_VERSION = "0.28.1"

# Part of the cache key: raise it when a change below, or a mend of the source, makes another wheel
# of the same versions.
RECIPE_REVISION = 3

# Used by Horovod's and Gloo's sources, and not included by them.
_CXX_HEADERS = ("cstdint", "stdexcept", "string")

_WRAPPER = """\
#!/bin/sh
# Runs the C++ compiler; only Horovod's own sources (*.cc) get the flags that mend its build.
extra=
for argument in "$@"; do
    case "$argument" in
{cases}
    esac
done
exec {compiler} "$@" $extra
"""


@dataclass(frozen=True)
class BuildRecipe:
    """The versions that a Horovod wheel is built for, and what follows from them.

    Parameters
    ----------
    tag : str
        The interpreter's most specific wheel tag, as ``packaging.tags`` gives it.
    torch, tensorflow : str or None
        The installed versions; None where the framework is not installed.
    cuda : str or None
        The CUDA version to build for; None builds for CPUs.
    horovod : str
        Horovod's version.
    """

    tag: str
    torch: str | None = None
    tensorflow: str | None = None
    cuda: str | None = None
    horovod: str = HOROVOD_VERSION

    @property
    def key(self) -> str:
        """Name of the cache folder: two builds share it exactly if their wheels are the same."""
        parts = [f"horovod-{self.horovod}", self.tag]
        if self.torch:
            parts.append(f"torch-{self.torch}")
        if self.tensorflow:
            parts.append(f"tensorflow-{self.tensorflow}")
        parts += [f"cuda-{self.cuda}" if self.cuda else "cpu", f"r{RECIPE_REVISION}"]
        return "_".join(parts)

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Modules of Horovod that the wheel makes importable."""
        found = (("torch", self.torch), ("tensorflow", self.tensorflow))
        return tuple(name for name, version in found if version)

    @property
    def cxx_standard(self) -> int:
        """The C++ standard that the frameworks' headers ask for."""
        if _at_least(self.torch, "2.13"):
            return 20
        if _at_least(self.torch, "2.1") or _at_least(self.tensorflow, "2.10"):
            return 17
        return 14

    @property
    def hides_xla(self) -> bool:
        """Whether ``xla_mpi_ops.cc`` has to be compiled as if TensorFlow were absent."""
        return _at_least(self.tensorflow, "2.18")

    def environment(
        self, *, cxx: str, jobs: int, cuda_home: str | None = None, nccl_home: str | None = None
    ) -> dict[str, str]:
        """Environment variables of the build, to be laid over the caller's own.

        Parameters
        ----------
        cxx : str
            Path of the script that `compiler_wrapper` is the text of.
        jobs : int
            Compilers to run at the same time.
        cuda_home : str or None
            The CUDA toolkit's folder, for a CUDA build.
        nccl_home : str or None
            A folder with NCCL's ``include`` and a shared library in ``lib``, for a CUDA build. By
            default Horovod looks for it among the system's.
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
                # Torch, which is asked for its libraries, takes the folder above nvcc's otherwise.
                variables |= {"HOROVOD_CUDA_HOME": cuda_home, "CUDA_HOME": cuda_home}
            if nccl_home:
                variables["HOROVOD_NCCL_INCLUDE"] = f"{nccl_home}/include"
                variables["HOROVOD_NCCL_LIB"] = f"{nccl_home}/lib"
                variables["HOROVOD_NCCL_LINK"] = "SHARED"
        return variables

    def compiler_wrapper(self, compiler: str) -> str:
        """Text of the shell script that stands in for `compiler`.

        Parameters
        ----------
        compiler : str
            The C++ compiler as a shell would run it: a path, or a command such as ``ccache g++``.
        """
        # Without debug symbols the build is faster and the wheel smaller; the warnings of a
        # released package are for nobody, and bury the error that a reader of the log looks for.
        headers = " ".join(f"-include {name}" for name in _CXX_HEADERS)
        flags = f"-std=gnu++{self.cxx_standard} -g0 -w {headers}"
        cases = [f'        *.cc) extra="{flags}" ;;']
        if self.hides_xla:
            hide = f"{flags} -UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=0"
            cases.insert(0, f'        *xla_mpi_ops.cc) extra="{hide}" ;;')
        return _WRAPPER.format(cases="\n".join(cases), compiler=compiler)


def _at_least(version: str | None, minimum: str) -> bool:
    return version is not None and Version(version).release >= Version(minimum).release
