"""Build settings that follow from the versions that Horovod is built for."""

import subprocess
from dataclasses import replace

import pytest

from hvd_estimators.commands import toolchain
from hvd_estimators.commands.toolchain import BuildRecipe

RECIPE = BuildRecipe("cp311-cp311-manylinux_2_36_x86_64", torch="2.13.0+cpu", tensorflow="2.21.0")


class TestRecipe:
    @pytest.mark.parametrize(
        ("torch", "tensorflow", "standard"),
        [
            ("2.13.0+cpu", None, 20),
            ("2.13.0", "2.21.0", 20),
            ("3.0.0", None, 20),
            ("2.12.1+cu126", "2.21.0", 17),
            (None, "2.21.0", 17),
        ],
    )
    def test_cxx_standard_is_the_highest_that_a_framework_requires(
        self, torch, tensorflow, standard
    ):
        assert BuildRecipe("tag", torch=torch, tensorflow=tensorflow).cxx_standard == standard

    @pytest.mark.parametrize(
        "change",
        [
            {"tag": "cp312-cp312-manylinux_2_36_x86_64"},
            {"torch": "2.13.1+cpu"},
            {"torch": None},
            {"tensorflow": "2.20.0"},
            {"tensorflow": None},
            {"cuda": "12.6"},
            {"compat": True},
            {"horovod": "0.28.2"},
        ],
    )
    def test_key_differs_if_any_field_differs(self, change):
        assert replace(RECIPE, **change).key != RECIPE.key

    def test_environment_turns_each_framework_on_or_off(self):
        both = RECIPE.environment(cxx="/tmp/cxx", jobs=3)
        torch_only = replace(RECIPE, tensorflow=None).environment(cxx="/tmp/cxx", jobs=3)

        assert {"HOROVOD_WITH_PYTORCH", "HOROVOD_WITH_TENSORFLOW"} <= both.keys()
        assert {"HOROVOD_WITH_PYTORCH", "HOROVOD_WITHOUT_TENSORFLOW"} <= torch_only.keys()
        assert "HOROVOD_WITH_TENSORFLOW" not in torch_only
        assert both["CXX"] == "/tmp/cxx"
        assert both["MAKEFLAGS"] == "-j3"

    def test_only_a_cuda_build_uses_nccl(self):
        cuda = replace(RECIPE, cuda="12.6")

        with_cuda = cuda.environment(cxx="c++", jobs=1, cuda_home="/opt/cuda")
        assert with_cuda["HOROVOD_GPU_OPERATIONS"] == "NCCL"
        assert with_cuda["HOROVOD_CUDA_HOME"] == with_cuda["CUDA_HOME"] == "/opt/cuda"
        assert not any("GPU" in name for name in RECIPE.environment(cxx="c++", jobs=1))


class TestCompilerWrapper:
    @pytest.fixture
    def flags(self, tmp_path):
        """Run the wrapper around a compiler that prints its arguments, one per line."""

        def run(recipe, *arguments):
            compiler = tmp_path / "show arguments"
            compiler.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
            compiler.chmod(0o755)
            wrapper = tmp_path / "cxx"
            wrapper.write_text(recipe.compiler_wrapper(f"'{compiler}'"))
            done = subprocess.run(
                ["sh", wrapper, *arguments], text=True, capture_output=True, check=True
            )
            return done.stdout.splitlines()

        return run

    def test_the_standard_follows_the_one_from_cmake(self, flags):
        given = ["-std=c++14", "-o", "ops.cc.o", "-c", "/src dir/ops.cc"]

        seen = flags(RECIPE, *given)

        assert seen[: len(given)] == given
        assert [flag for flag in seen if flag.startswith("-std=")][-1] == "-std=gnu++20"

    def test_linking_and_cuda_compilation_are_unchanged(self, flags):
        for given in (["-shared", "ops.cc.o", "-o", "lib.so"], ["-std=c++11", "-c", "kernels.cu"]):
            assert flags(RECIPE, *given) == given

    def test_tensorflow_is_hidden_only_from_the_xla_file(self, flags):
        hidden = {"-UTENSORFLOW_VERSION", "-DTENSORFLOW_VERSION=0"}

        assert hidden <= set(flags(RECIPE, "-c", "/src/tensorflow/xla_mpi_ops.cc"))
        assert not hidden & set(flags(RECIPE, "-c", "/src/tensorflow/mpi_ops.cc"))

    def test_the_newer_standard_overrides_the_requested_one(self, tmp_path):
        source = tmp_path / "source.cc"
        source.write_text("consteval int f() { return 1; }\nint main() { return f(); }\n")
        # As in Horovod's own files, an include is missing.
        with source.open("a") as file:
            file.write(
                "void g(uint8_t, const std::string&) { throw std::logic_error(std::string()); }\n"
            )
        wrapper = tmp_path / "cxx"
        compiler = toolchain.find_compiler()
        wrapper.write_text(RECIPE.compiler_wrapper(compiler))
        arguments = ["-std=c++14", "-fsyntax-only", str(source)]

        assert subprocess.run([compiler, *arguments], capture_output=True).returncode != 0
        assert subprocess.run(["sh", wrapper, *arguments], capture_output=True).returncode == 0
