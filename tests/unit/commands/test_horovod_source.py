"""Patches and records of Horovod's source, and what imports of a wheel and pip make of them."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
from horovod_wheels import RECIPE, make_patched_source
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvd_estimators.commands.horovod_source import PATCHES
from hvd_estimators.commands.toolchain import detect_recipe
from hvd_estimators.launch import horovod_build
from hvd_estimators.launch.horovod_build import (
    BUILD_FILE,
    REVISION,
    describe_build,
    horovod_problem,
    installed_record,
)
from hvd_estimators.launch.rendezvous.client import ADDRESS_VARIABLE, TOKEN_VARIABLE

TORCH_ONLY = replace(RECIPE, tensorflow=None)
COMPAT = replace(RECIPE, compat=True)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes a folder the only one with a Horovod."""

    def pretend(folder):
        found = folder and SimpleNamespace(submodule_search_locations=[str(folder / "horovod")])
        monkeypatch.setattr(horovod_build, "find_spec", lambda name: found)

    return pretend


def run(code, *path, flags=(), **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, text=True, capture_output=True, env=environment)


class TestPatches:
    def test_they_read_the_variables_that_tasks_set(self):
        texts = "".join(patch.read_text() for patch in PATCHES)

        assert f'getenv("{ADDRESS_VARIABLE}")' in texts
        assert f'getenv("{TOKEN_VARIABLE}")' in texts

    def test_the_installed_horovod_has_the_version_and_requirements_of_its_build(self):
        built = installed_record()

        assert built["revision"] == REVISION
        assert metadata.version("horovod") == built["version"]
        requires = {str(Requirement(text)) for text in metadata.requires("horovod")}
        assert set(built["requires"]) <= requires
        recipe = detect_recipe(compat=built["compat"])
        assert recipe.version == built["version"]


class TestVersion:
    def test_it_satisfies_the_release_and_newer_builds_sort_later(self):
        newer = TORCH_ONLY.version.removesuffix(str(REVISION)) + "100"
        versions = [COMPAT.version, replace(TORCH_ONLY, torch="2.9.1").version]
        versions += [TORCH_ONLY.version, newer]

        assert sorted(versions, key=Version) == versions
        assert all(SpecifierSet("==0.28.1").contains(version) for version in versions)
        assert min(map(Version, versions)) > Version("0.28.1")


class TestRecord:
    def test_the_installed_build_is_compared_without_importing_it(
        self, tmp_path, monkeypatch, install
    ):
        install(make_patched_source(tmp_path, TORCH_ONLY))
        versions = {"torch": "2.13.0", "tensorflow": "2.21.0"}
        monkeypatch.setattr(horovod_build, "installed_version", lambda *names: versions[names[0]])
        monkeypatch.setattr(horovod_build, "cuda_of", lambda framework: None)

        assert installed_record() == TORCH_ONLY.record()
        assert describe_build(installed_record()) == "torch 2.13.0+cpu, CPU"
        assert horovod_problem("torch") is None
        assert horovod_problem("tensorflow") == "this Horovod was built without TensorFlow"
        versions["torch"] = "2.14.0"
        assert horovod_problem("torch") == (
            "this Horovod was built for torch 2.13.0+cpu, installed is 2.14.0"
        )
        (tmp_path / BUILD_FILE).unlink()
        assert "without the patches" in str(horovod_problem("torch"))
        install(None)
        assert installed_record() == {}
        assert horovod_problem("torch") == "Horovod is not installed"


class TestImportOfAFramework:
    @pytest.fixture
    def source(self, tmp_path):
        return make_patched_source(tmp_path / "source", TORCH_ONLY)

    def imported(self, source, framework, version, cuda=None, code="import horovod.{}", path=()):
        """Import a module of Horovod beside a framework of this version; return the error."""
        folder = source.parent / "frameworks"
        (folder / framework).mkdir(parents=True, exist_ok=True)
        text = f"__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n"
        (folder / framework / "__init__.py").write_text(text)
        done = run(code.format(framework), source, folder, *path, flags=["-S"])
        return done.stderr.splitlines()[-1] if done.returncode else "imports"

    def test_it_succeeds_with_the_framework_of_the_build(self, source):
        assert self.imported(source, "torch", "2.13.0+cpu") == "imports"
        assert self.imported(source, "torch", "2.13.0", "13.0") == "imports"

    @pytest.mark.parametrize(
        ("framework", "version", "told"),
        [
            ("torch", "2.12.0", "for torch 2.13.0+cpu, installed is 2.12.0. "),
            ("tensorflow", "2.21.0", "without TensorFlow. "),
        ],
    )
    def test_another_framework_is_named(self, source, framework, version, told):
        error = self.imported(source, framework, version)

        assert error.startswith(f"ImportError: This Horovod was built {told}")
        assert error.endswith("hvd-estimators build-horovod")


class TestImportOfHorovodSpark:
    @pytest.mark.parametrize(
        "code", ["import horovod.spark", "from horovod.spark.torch import TorchEstimator"]
    )
    def test_the_error_names_the_replacements(self, tmp_path, code):
        done = run(code, make_patched_source(tmp_path, RECIPE), flags=["-S"])

        assert done.returncode == 1
        message = done.stderr[done.stderr.index("ImportError:") :]
        for name in ("hvd_estimators.torch", "hvd_estimators.keras", "hvd_estimators.lightning"):
            assert name in message

    def test_other_modules_import_and_so_does_the_old_package_on_request(self, tmp_path):
        source = make_patched_source(tmp_path, RECIPE)
        code = "from horovod.spark.torch import TorchEstimator; print(TorchEstimator)"

        assert run("import horovod.runner", source, flags=["-S"]).stderr == ""
        done = run(code, source, flags=["-S"], HVD_ESTIMATORS_HOROVOD_SPARK="1")
        assert "the frozen" in done.stdout

    def test_compat_finds_this_package_without_setup(self, tmp_path):
        source = make_patched_source(tmp_path, COMPAT)
        real = importlib.util.find_spec("horovod").submodule_search_locations[0]
        code = (
            f"import horovod; horovod.__path__.append({real!r})  # for horovod.runner\n"
            "import horovod.spark.common.store as store, horovod.spark, sys\n"
            "from horovod.spark.common import constants\n"
            "print(store.Store.__module__, store.__name__, horovod.spark.__name__)\n"
            "print(horovod.spark is sys.modules['hvd_estimators.compat.spark'], horovod.__file__)"
        )

        first, second = run(code, source, *sys.path).stdout.splitlines()

        spark = "hvd_estimators.compat.spark"
        assert first == f"hvd_estimators.store.base {spark}.common.store {spark}"
        assert second == f"True {source}/horovod/__init__.py"
