"""Versions, requirements and records of finished wheels, and their use by pip and imports."""

import ast
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from horovod_wheels import RECIPE, WHEEL_NAME, is_as_recorded, make_package, make_wheel
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvd_estimators.commands.finished_wheel import FINISH_REVISION, finish_wheel, local_version
from hvd_estimators.commands.toolchain import RECIPE_REVISION
from hvd_estimators.exceptions import DependencyError
from hvd_estimators.launch import horovod_build
from hvd_estimators.launch.horovod_build import (
    BUILD_FILE,
    MARKER,
    PATCHES_REVISION,
    check_builds,
    describe_build,
    horovod_problem,
    installed_record,
    read_record,
)

TORCH_ONLY = replace(RECIPE, tensorflow=None)
# The compiled wheels of these tests contain no patches.
REVISION = f"{RECIPE_REVISION}.0.{FINISH_REVISION}"


def finished(folder, recipe=TORCH_ONLY, with_compat=False, name=WHEEL_NAME):
    compiled = make_wheel(folder / name, "x = 1")
    wheel = finish_wheel(compiled, folder, recipe.record("g++"), with_compat)
    compiled.unlink()
    return wheel


def read(wheel, file):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(file)]
    return archive.read(name).decode()


class TestVersion:
    def test_file_name_and_metadata_contain_frameworks_device_and_revision(self, tmp_path):
        wheel = finished(tmp_path, RECIPE)

        version = f"0.28.1+torch2.13.0.tensorflow2.21.0.cpu.{REVISION}"
        assert wheel.name == f"horovod-{version}-cp311-cp311-linux_x86_64.whl"
        assert f"\nVersion: {version}\n" in read(wheel, "/METADATA")
        assert read(wheel, "/METADATA").endswith("\n\nText.\n")
        assert f"horovod-{version}.dist-info/METADATA" in zipfile.ZipFile(wheel).namelist()
        assert is_as_recorded(wheel)

    def test_versions_satisfy_the_release_and_newer_builds_sort_later(self):
        record = RECIPE.record()
        cuda = {**record, "tensorflow": None, "cuda": "13.0", "torch": "2.9.1+cu130"}
        versions = [
            local_version(record, with_compat=True),
            local_version(cuda, with_compat=False),
            local_version({**record, "tensorflow": None}, with_compat=False),
            local_version({**record, "tensorflow": None, "patches": 10}, with_compat=False),
            local_version({**record, "tensorflow": None, "recipe": 10}, with_compat=False),
        ]

        revision = f"{RECIPE_REVISION}.{PATCHES_REVISION}.{FINISH_REVISION}"
        assert versions[1] == f"0.28.1+torch2.9.1.cu130.{revision}"
        assert sorted(versions, key=Version) == versions
        assert all(SpecifierSet("==0.28.1").contains(version) for version in versions)
        assert min(map(Version, versions)) > Version("0.28.1")

    def test_the_framework_versions_of_the_build_are_required(self, tmp_path):
        lines = read(finished(tmp_path, RECIPE), "/METADATA").splitlines()

        requirements = [line for line in lines if line.startswith("Requires-Dist: ")]
        assert requirements == ["Requires-Dist: torch==2.13.0", "Requires-Dist: tensorflow==2.21.0"]

    def test_finishing_a_wheel_is_reproducible(self, tmp_path):
        # A second one, compiled later, could contain another time.
        compiled, record = make_wheel(tmp_path / WHEEL_NAME, "x = 1"), TORCH_ONLY.record("g++")
        for with_compat in (False, True):
            first = finish_wheel(compiled, tmp_path, record, with_compat).read_bytes()
            assert finish_wheel(compiled, tmp_path, record, with_compat).read_bytes() == first


class TestRecord:
    def test_the_record_of_the_compiled_wheel_is_kept(self, tmp_path):
        """The step that finds a wheel in the cache does not know the compiler that built it."""
        compiled = make_wheel(tmp_path / WHEEL_NAME, "x = 1")
        with zipfile.ZipFile(compiled, "a") as wheel:
            record = TORCH_ONLY.record("g++")
            wheel.writestr(BUILD_FILE, f"BUILD = {record!r}")

        built = read_record(read(finish_wheel(compiled, tmp_path, RECIPE.record()), BUILD_FILE))

        assert built == record
        assert "g++" in built["compiler"].lower() or "gcc" in built["compiler"].lower()
        assert built["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")

    def test_threads_parse_records_one_at_a_time(self, monkeypatch):
        """Python 3.11.7 raises SystemError in fits of a parallel grid that parse together."""
        parsing, overlaps = [], []
        parse = ast.parse

        def parse_slowly(text):
            parsing.append(text)
            overlaps.extend(parsing[:-1])
            time.sleep(0.05)
            parsing.remove(text)
            return parse(text)

        monkeypatch.setattr(horovod_build.ast, "parse", parse_slowly)
        texts = [f"BUILD = {{'torch': '{minor}'}}" for minor in range(4)]
        with ThreadPoolExecutor(4) as pool:
            records = list(pool.map(read_record, texts))

        assert [record["torch"] for record in records] == ["0", "1", "2", "3"]
        assert overlaps == []
        records[3]["torch"] = "changed"
        assert read_record(texts[3]) == {"torch": "3"}

    def test_an_older_wheel_gets_a_record_with_its_own_patches(self, tmp_path):
        compiled = make_wheel(tmp_path / WHEEL_NAME, "x = 1")
        with zipfile.ZipFile(compiled, "a") as wheel:
            wheel.writestr(MARKER, "REVISION = 1\n")

        built = read_record(read(finish_wheel(compiled, tmp_path, RECIPE.record()), BUILD_FILE))

        assert built == {**RECIPE.record(), "patches": 1, "compiler": None}

    def test_the_installed_build_is_compared_without_importing_it(self, tmp_path, monkeypatch):
        site = tmp_path / "site"
        zipfile.ZipFile(finished(tmp_path)).extractall(site)
        (site / MARKER).write_text("REVISION = 2\n")
        folder = SimpleNamespace(submodule_search_locations=[str(site / "horovod")])
        found = {"horovod": folder}
        monkeypatch.setattr(horovod_build, "find_spec", found.get)
        versions = {"torch": "2.13.0", "tensorflow": "2.21.0"}
        monkeypatch.setattr(horovod_build, "installed_version", lambda *names: versions[names[0]])

        assert describe_build(installed_record()) == "torch 2.13.0+cpu, CPU"
        assert horovod_problem("torch") is None
        assert horovod_problem("tensorflow") == "this Horovod was built without TensorFlow"
        versions["torch"] = "2.14.0"
        assert horovod_problem("torch") == (
            "this Horovod was built for torch 2.13.0+cpu, installed is 2.14.0"
        )
        (site / MARKER).unlink()
        assert "without the patches" in str(horovod_problem("torch"))
        found.clear()
        assert installed_record() == {}
        assert horovod_problem("torch") == "Horovod is not installed"

    def test_an_empty_horovod_folder_is_not_an_installation(self, tmp_path, monkeypatch):
        (tmp_path / "horovod").mkdir()
        folder = SimpleNamespace(submodule_search_locations=[str(tmp_path / "horovod")])
        monkeypatch.setattr(horovod_build, "find_spec", lambda name: folder)

        assert horovod_problem("torch") == "Horovod is not installed"

    def test_different_builds_on_ranks_are_an_error_that_describes_them(self):
        builds = [f"{describe_build(recipe.record())} (1a)" for recipe in (RECIPE, TORCH_ONLY)]

        expected = r"torch 2\.13\.0\+cpu and TensorFlow 2\.21\.0, CPU \(1a\) on a; torch .* on b"
        with pytest.raises(DependencyError, match=expected):
            check_builds(["a", "b"], builds)


class TestImport:
    @pytest.fixture
    def wheel(self, tmp_path):
        return finished(tmp_path)

    def imported(self, wheel, framework, version, cuda=None, code="import horovod.{}", path=()):
        """Import a module of the wheel beside a framework of this version; return the error."""
        folder = wheel.parent / "frameworks"
        (folder / framework).mkdir(parents=True, exist_ok=True)
        text = f"__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n"
        (folder / framework / "__init__.py").write_text(text)
        path = os.pathsep.join(map(str, [wheel, folder, *path]))
        command = [sys.executable, "-S", "-c", code.format(framework)]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, text=True, capture_output=True, env=environment)
        return done.stderr.splitlines()[-1] if done.returncode else "imports"

    def test_import_succeeds_with_the_framework_of_the_build(self, wheel):
        assert self.imported(wheel, "torch", "2.13.0+cpu") == "imports"
        assert self.imported(wheel, "torch", "2.13.0", "13.0") == "imports"

    @pytest.mark.parametrize(
        ("framework", "version", "told"),
        [
            ("torch", "2.12.0", "for torch 2.13.0+cpu, installed is 2.12.0. "),
            ("tensorflow", "2.21.0", "without TensorFlow. "),
        ],
    )
    def test_import_with_another_framework_names_it(self, wheel, framework, version, told):
        error = self.imported(wheel, framework, version)

        assert error.startswith(f"ImportError: This Horovod was built {told}")
        assert error.endswith("hvd-estimators build-horovod")

    def test_public_names_that_need_horovod_raise_the_typed_error(self, wheel):
        code = (
            "from hvd_estimators._util.lazy_imports import lazy_names\n"
            "lazy_names('hvd_estimators.keras', {{'KerasEstimator': 'horovod.{}'}})[0]"
            "('KerasEstimator')"
        )

        error = self.imported(wheel, "torch", "2.12.0", code=code, path=sys.path)

        start = "hvd_estimators.exceptions.DependencyError: hvd_estimators.keras needs horovod. "
        assert error.startswith(f"{start}This Horovod was built for torch 2.13.0+cpu, installed is")

    def test_a_cuda_build_names_a_torch_without_cuda(self, tmp_path):
        wheel = finished(tmp_path, replace(TORCH_ONLY, torch="2.13.0", cuda="13.0"))

        assert self.imported(wheel, "torch", "2.13.0", "13.2") == "imports"
        error = self.imported(wheel, "torch", "2.13.0+cpu")
        assert "with CUDA 13.0, installed is torch 2.13.0+cpu, built for CPUs" in error


@pytest.mark.soak
def test_pip_selects_the_wheel_that_matches_the_frameworks(tmp_path):
    index = tmp_path / "index"
    index.mkdir()
    for torch in ("2.12.0", "2.13.0+cpu"):
        make_package(index, "torch", torch)
        finished(index, replace(TORCH_ONLY, torch=torch), name="horovod-0.28.1-py3-none-any.whl")

    # The user's configuration may name further indexes.
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    environment = {**inherited, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}

    def installed(*requirements):
        target = tmp_path / f"site {len(list(tmp_path.iterdir()))}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
        command += ["--find-links", index, "--target", target, *requirements]
        done = subprocess.run(command, text=True, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr
        return read_record((target / BUILD_FILE).read_text())["torch"]

    assert installed("horovod==0.28.1", "torch==2.12.0") == "2.12.0"
    assert installed("horovod==0.28.1", "torch") == "2.13.0+cpu"
    assert installed(f"horovod==0.28.1+torch2.12.0.cpu.{REVISION}") == "2.12.0"
