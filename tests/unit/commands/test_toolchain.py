"""Detection of frameworks, CUDA and cores for a build of Horovod."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_estimators.commands import toolchain
from hvd_estimators.commands.toolchain import (
    default_jobs,
    detect_recipe,
    find_cuda_toolkit,
    find_nccl,
)
from hvd_estimators.exceptions import BuildError, DependencyError
from hvd_estimators.launch import horovod_build
from hvd_estimators.launch.horovod_build import cuda_of


class TestDetection:
    def test_framework_versions_are_read_without_importing_them(self):
        script = (
            "import sys\n"
            "from hvd_estimators.commands.toolchain import detect_recipe\n"
            "recipe = detect_recipe('none')\n"
            "print({'torch', 'tensorflow', 'horovod'} & set(sys.modules))\n"
            "import torch\n"
            # Of PyPI's build for CUDA, only the module's version has a local label.
            "print(torch.__version__.startswith(recipe.torch))\n"
        )
        done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
        assert done.stdout.split("\n")[:2] == ["set()", "True"], done.stderr

    def test_without_a_framework_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(toolchain, "installed_version", lambda *names: None)

        with pytest.raises(DependencyError, match=r'pip install "<clone or .*>\[torch\]"'):
            detect_recipe()

    @pytest.mark.parametrize(
        ("gpu", "torch_cuda", "toolkit", "expected"),
        [
            ("auto", "12.6", Path("/cuda"), "12.6"),
            ("auto", "12.6", None, None),
            ("auto", None, Path("/cuda"), None),
            ("none", "12.6", Path("/cuda"), None),
            ("cuda", "12.6", Path("/cuda"), "12.6"),
        ],
    )
    def test_cuda_needs_both_a_cuda_framework_and_a_toolkit(
        self, monkeypatch, gpu, torch_cuda, toolkit, expected
    ):
        monkeypatch.setattr(toolchain, "cuda_of", lambda framework: torch_cuda)
        monkeypatch.setattr(toolchain, "find_cuda_toolkit", lambda: toolkit)

        assert detect_recipe(gpu).cuda == expected

    @pytest.mark.parametrize(
        ("torch_cuda", "toolkit", "message"),
        [(None, Path("/cuda"), "is built for CPUs"), ("12.6", None, "no CUDA toolkit")],
    )
    def test_unavailable_cuda_is_an_error_if_requested(
        self, monkeypatch, torch_cuda, toolkit, message
    ):
        monkeypatch.setattr(toolchain, "cuda_of", lambda framework: torch_cuda)
        monkeypatch.setattr(toolchain, "find_cuda_toolkit", lambda: toolkit)

        with pytest.raises(BuildError, match=message):
            detect_recipe("cuda")

    @pytest.mark.parametrize(
        ("framework", "note", "content", "expected"),
        [
            ("torch", "version.py", "cuda: Optional[str] = '12.6'\nhip = None\n", "12.6"),
            ("torch", "version.py", "cuda = '11.8'\n", "11.8"),
            ("torch", "version.py", "cuda: Optional[str] = None\nhip = '6.4'\n", None),
            (
                "tensorflow",
                "python/platform/build_info.py",
                "build_info = dict([('cuda_version', '12.5.1'), ('is_cuda_build', True)])\n",
                "12.5.1",
            ),
            ("tensorflow", "python/platform/build_info.py", "build_info = dict()\n", None),
        ],
    )
    def test_cuda_version_is_read_from_the_frameworks_files(
        self, monkeypatch, tmp_path, framework, note, content, expected
    ):
        path = tmp_path / note
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(horovod_build, "find_spec", lambda name: found)

        assert cuda_of(framework) == expected

    def test_the_toolkit_of_cuda_home_takes_precedence_over_path(self, monkeypatch, tmp_path):
        def make_nvcc(folder: str) -> Path:
            (tmp_path / folder / "bin").mkdir(parents=True)
            (tmp_path / folder / "bin/nvcc").touch(mode=0o755)
            return tmp_path / folder

        def make_toolkit(name: str, include: str = "include") -> Path:
            folder = make_nvcc(name)
            (folder / include).mkdir(parents=True)
            (folder / include / "cuda_runtime.h").touch()
            return folder

        for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(toolchain, "_CUDA_FOLDER", tmp_path / "usual")
        # A script that starts another nvcc, or the remains of a package.
        script = make_nvcc("script")
        monkeypatch.setenv("PATH", str(script / "bin"))
        assert find_cuda_toolkit() is None
        usual = make_toolkit("usual", "targets/x86_64-linux/include")
        assert find_cuda_toolkit() == usual

        linked = make_toolkit("linked")
        (tmp_path / "links").mkdir()
        (tmp_path / "links/nvcc").symlink_to(linked / "bin/nvcc")
        monkeypatch.setenv("PATH", str(tmp_path / "links"))
        assert find_cuda_toolkit() == linked

        monkeypatch.setenv("CUDA_HOME", str(make_toolkit("home")))
        assert find_cuda_toolkit() == tmp_path / "home"

    def test_nccl_is_that_of_torch_unless_another_is_specified(self, monkeypatch, tmp_path):
        for name in ("HOME", "INCLUDE", "LIB"):
            monkeypatch.delenv(f"HOROVOD_NCCL_{name}", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        notes = tmp_path / "nvidia_nccl_cu13-2.28.9.dist-info" / "METADATA"
        notes.parent.mkdir()
        notes.write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.28.9\n")
        folder = tmp_path / "nvidia" / "nccl"
        (folder / "include").mkdir(parents=True)
        (folder / "include" / "nccl.h").touch()
        assert find_nccl("13.0") is None

        (folder / "lib").mkdir()
        (folder / "lib" / toolchain.NCCL_LIBRARY).touch()
        assert find_nccl("13.0") == folder
        assert find_nccl("12.6") is None

        monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "other"))
        assert find_nccl("13.0") is None

    @pytest.mark.parametrize(
        ("cores", "gigabytes", "jobs"), [(8, 64, 8), (8, 3.5, 2), (8, 0.2, 1), (1, 64, 1)]
    )
    def test_jobs_are_bounded_by_cores_and_by_memory(self, monkeypatch, cores, gigabytes, jobs):
        memory = SimpleNamespace(available=gigabytes * 2**30)
        monkeypatch.setattr(toolchain.psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)

        assert default_jobs() == jobs
