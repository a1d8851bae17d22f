"""The build of Horovod, with a stand-in for pip: nothing here compiles Horovod itself."""

import base64
import contextlib
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hvd_estimators.commands import build, build_tools
from hvd_estimators.commands.build import (
    build_horovod,
    build_wheel,
    default_cache_dir,
    install_wheel,
)
from hvd_estimators.commands.build_mends import MENDS
from hvd_estimators.commands.build_recipe import BuildRecipe
from hvd_estimators.commands.build_redirect import redirect_horovod_spark
from hvd_estimators.commands.build_tools import cuda_of, default_jobs, detect_recipe, find_nvcc
from hvd_estimators.exceptions import BuildError, DependencyError
from hvd_estimators.launch.mends import MENDS_REVISION

RECIPE = BuildRecipe("cp311-cp311-manylinux_2_36_x86_64", torch="2.13.0+cpu", tensorflow="2.21.0")
WHEEL_NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def folder(tmp_path):
    """A wheel's folder in an empty cache."""
    path = tmp_path / "wheels" / RECIPE.key
    path.mkdir(parents=True)
    return path


@pytest.fixture
def fake_pip(tmp_path, archive):
    """Make a command that stands in for ``python -m pip`` and builds as its `body` says.

    The body finds the value of ``--wheel-dir`` in `wheel_dir`. A download is `archive`.
    """

    def make(body):
        script = tmp_path / "fake_pip.py"
        script.write_text(DOWNLOAD.format(archive=str(archive)) + BUILD + body)
        return [sys.executable, str(script)]

    return make


DOWNLOAD = """\
import os, pathlib, shutil, sys, time
if sys.argv[1] == "download":
    folder = sys.argv[sys.argv.index("--dest") + 1]
    os.makedirs(folder)
    shutil.copy({archive!r}, folder)
    sys.exit()
"""
BUILD = "wheel_dir = pathlib.Path(sys.argv[sys.argv.index('--wheel-dir') + 1])\n"


@pytest.fixture
def archive(tmp_path):
    """Pack what the mends look for in Horovod's source."""
    source = tmp_path / "horovod-0.28.1"
    for path in {mend.path for mend in MENDS}:
        text = "// between\n".join(mend.before for mend in MENDS if mend.path == path)
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    (source / "setup.py").touch()
    (source / "horovod/__init__.py").touch()
    packed = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(source, source.name)
    return packed


def make_wheel(path, text):
    """Write a small Horovod, which pip can install."""
    info = "horovod-0.28.1.dist-info"
    files = {
        "horovod/__init__.py": "",
        "horovod/torch/__init__.py": text,
        "horovod/spark/__init__.py": "run = 'the frozen one'\n",
        "horovod/spark/torch.py": "TorchEstimator = 'the frozen one'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{name},sha256={urlsafe_sha256(body)},{len(body)}" for name, body in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, body in files.items():
            wheel.writestr(name, body)
    return path


def urlsafe_sha256(text):
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def no_wheels(folder):
    return not list(folder.parent.rglob("*.whl"))


def scratch_folders(folder):
    return list(folder.parent.glob(".build-*"))


class TestDetection:
    def test_versions_are_those_of_the_frameworks_and_none_is_imported(self):
        script = (
            "import sys\n"
            "from hvd_estimators.commands.build_tools import detect_recipe\n"
            "recipe = detect_recipe('none')\n"
            "print({'torch', 'tensorflow', 'horovod'} & set(sys.modules))\n"
            "import torch\n"
            "print(recipe.torch == torch.__version__)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
        assert done.stdout.split("\n")[:2] == ["set()", "True"], done.stderr

    def test_without_a_framework_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(build_tools, "installed_version", lambda *names: None)

        with pytest.raises(DependencyError, match=re.escape('pip install "hvd_estimators[torch]"')):
            detect_recipe()

    @pytest.mark.parametrize(
        ("gpu", "torch_cuda", "nvcc", "expected"),
        [
            ("auto", "12.6", Path("/cuda/bin/nvcc"), "12.6"),
            ("auto", "12.6", None, None),
            ("auto", None, Path("/cuda/bin/nvcc"), None),
            ("none", "12.6", Path("/cuda/bin/nvcc"), None),
            ("cuda", "12.6", Path("/cuda/bin/nvcc"), "12.6"),
        ],
    )
    def test_cuda_needs_both_a_cuda_framework_and_nvcc(
        self, monkeypatch, gpu, torch_cuda, nvcc, expected
    ):
        monkeypatch.setattr(build_tools, "cuda_of", lambda framework: torch_cuda)
        monkeypatch.setattr(build_tools, "find_nvcc", lambda: nvcc)

        assert detect_recipe(gpu).cuda == expected

    @pytest.mark.parametrize(
        ("torch_cuda", "nvcc", "message"),
        [(None, Path("/cuda/bin/nvcc"), "is built for CPUs"), ("12.6", None, "no nvcc was found")],
    )
    def test_cuda_asked_for_in_vain_is_an_error(self, monkeypatch, torch_cuda, nvcc, message):
        monkeypatch.setattr(build_tools, "cuda_of", lambda framework: torch_cuda)
        monkeypatch.setattr(build_tools, "find_nvcc", lambda: nvcc)

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
        monkeypatch.setattr(build_tools, "find_spec", lambda name: found)

        assert cuda_of(framework) == expected

    def test_nvcc_of_cuda_home_goes_before_the_one_on_path(self, monkeypatch, tmp_path):
        for folder in ("home/bin", "path"):
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / "nvcc").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
        monkeypatch.delenv("CUDA_HOME", raising=False)
        assert find_nvcc() == tmp_path / "path/nvcc"

        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
        assert find_nvcc() == tmp_path / "home/bin/nvcc"

    @pytest.mark.parametrize(
        ("cores", "gigabytes", "jobs"), [(8, 64, 8), (8, 3.5, 2), (8, 0.2, 1), (1, 64, 1)]
    )
    def test_jobs_are_bounded_by_cores_and_by_memory(self, monkeypatch, cores, gigabytes, jobs):
        memory = SimpleNamespace(available=gigabytes * 2**30)
        monkeypatch.setattr(build_tools.psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)

        assert default_jobs() == jobs


class TestBuildWheel:
    def test_the_wheel_is_moved_into_the_cache_and_the_scratch_folder_removed(
        self, folder, fake_pip
    ):
        pip = fake_pip(f"(wheel_dir / {WHEEL_NAME!r}).write_text('whole')")

        wheel = build_wheel(RECIPE, folder, pip=pip)

        assert wheel == folder / WHEEL_NAME
        assert wheel.read_text() == "whole"
        assert not scratch_folders(folder)

    def test_a_failed_build_tells_its_errors_and_leaves_no_wheel(self, folder, fake_pip):
        pip = fake_pip(
            f"(wheel_dir / {WHEEL_NAME!r}).write_text('half')\n"
            "print('  ops.cc:12:3: error: no member named x')\n"
            "for i in range(1000): print('note', i)\n"
            "sys.exit(3)"
        )

        with pytest.raises(BuildError) as raised:
            build_wheel(RECIPE, folder, pip=pip)

        message = str(raised.value)
        assert "exit status 3" in message
        assert "ops.cc:12:3: error: no member named x" in message
        assert message.endswith("note 999")
        assert len(message.splitlines()) < 40
        log = folder / "build.log"
        assert str(log) in message
        assert "note 0\n" in log.read_text()
        assert no_wheels(folder)
        assert not scratch_folders(folder)

    def test_the_mended_source_is_what_is_built(self, folder, fake_pip):
        pip = fake_pip(
            "source = pathlib.Path(sys.argv[-1])\n"
            "files = [*source.rglob('*.cc'), *source.rglob('*_mends.py')]\n"
            f"(wheel_dir / {WHEEL_NAME!r}).write_text(''.join(p.read_text() for p in files))"
        )

        built = build_wheel(RECIPE, folder, pip=pip).read_text()

        for mend in MENDS:
            assert mend.after in built, mend
        assert f"REVISION = {MENDS_REVISION}\n" in built

    def test_a_source_that_is_not_known_is_not_built(self, folder, fake_pip, archive):
        with tarfile.open(archive, "w:gz") as tar:
            setup = archive.with_name("setup.py")
            setup.touch()
            tar.add(setup, "horovod-0.28.1/setup.py")

        with pytest.raises(BuildError, match=r"(?s)not as it is known: \S+\.cc has 0 times.*PyPI"):
            build_wheel(RECIPE, folder, pip=fake_pip("sys.exit('compiled')"))

        assert no_wheels(folder)
        assert not scratch_folders(folder)

    def test_a_build_without_a_wheel_is_an_error(self, folder, fake_pip):
        with pytest.raises(BuildError, match="made no wheel"):
            build_wheel(RECIPE, folder, pip=fake_pip(""))

    def test_a_failed_rebuild_keeps_the_wheel_that_was_there(self, folder, fake_pip):
        (folder / WHEEL_NAME).write_text("from before")

        with pytest.raises(BuildError):
            build_wheel(RECIPE, folder, pip=fake_pip("sys.exit(1)"))

        assert (folder / WHEEL_NAME).read_text() == "from before"

    def test_missing_build_tools_are_fetched_for_the_build_alone(
        self, folder, tmp_path, monkeypatch, archive
    ):
        monkeypatch.setattr(build, "missing_build_packages", lambda: ["cmake", "cffi"])
        calls = tmp_path / "calls"
        pip = tmp_path / "fake_pip.py"
        pip.write_text(
            "import sys\n"
            f"with open({str(calls)!r}, 'a') as calls:\n"
            "    print(*sys.argv[1:], file=calls)\n"
            + DOWNLOAD.format(archive=str(archive))
            + "if sys.argv[1] == 'install':\n"
            "    os.makedirs(os.path.join(sys.argv[sys.argv.index('--target') + 1], 'bin'))\n"
            "else:\n"
            "    assert os.path.isdir(os.environ['PATH'].split(':')[0]), 'tools are not on PATH'\n"
            "    folder = sys.argv[sys.argv.index('--wheel-dir') + 1]\n"
            f"    pathlib.Path(folder, {WHEEL_NAME!r}).touch()\n"
        )

        build_wheel(RECIPE, folder, pip=[sys.executable, str(pip)])

        install, download, wheel = calls.read_text().splitlines()
        assert re.fullmatch(r"install --target \S+ cmake cffi", install)
        assert download.startswith("download ")
        assert download.endswith(" horovod==0.28.1")
        assert wheel.startswith("wheel ")
        assert wheel.endswith("/horovod-0.28.1")

    def test_the_users_own_horovod_choices_do_not_reach_the_build(
        self, folder, fake_pip, monkeypatch
    ):
        monkeypatch.setenv("HOROVOD_WITHOUT_PYTORCH", "1")
        monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
        monkeypatch.setenv("HOROVOD_NCCL_HOME", "/opt/nccl")
        names = "sorted(name for name in os.environ if name.startswith('HOROVOD_'))"
        pip = fake_pip(f"(wheel_dir / {WHEEL_NAME!r}).write_text(' '.join({names}))")

        seen = build_wheel(RECIPE, folder, pip=pip).read_text().split()

        expected = RECIPE.environment(cxx="", jobs=1).keys()
        assert set(seen) == {name for name in expected if name.startswith("HOROVOD_")} | {
            "HOROVOD_NCCL_HOME"
        }

    def test_a_long_build_shows_how_far_it_is(self, folder, fake_pip, monkeypatch):
        monkeypatch.setattr(build, "_SIGN_OF_LIFE_SECONDS", 0.3)
        lines = []
        pip = fake_pip(
            "print('  [ 43%] Building CXX object a.cc.o', flush=True)\n"
            "print('  long command of the compiler', flush=True)\n"
            f"time.sleep(1.5)\n(wheel_dir / {WHEEL_NAME!r}).touch()"
        )

        build_wheel(RECIPE, folder, pip=pip, report=lines.append)

        assert any("[ 43%] Building CXX object a.cc.o" in line for line in lines)
        assert any(str(folder / "build.log") in line for line in lines)

    def test_what_the_build_started_ends_when_it_is_interrupted(
        self, folder, fake_pip, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(build, "_SIGN_OF_LIFE_SECONDS", 0.1)
        pid_file = tmp_path / "compiler.pid"
        pip = fake_pip(
            "import subprocess\n"
            "compiler = subprocess.Popen(['sleep', '600'])\n"
            f"pathlib.Path({str(pid_file)!r}).write_text(str(compiler.pid))\n"
            "compiler.wait()"
        )

        def interrupt_once_it_compiles(line):
            if pid_file.exists() and pid_file.read_text():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build_wheel(RECIPE, folder, pip=pip, report=interrupt_once_it_compiles)

        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid_file.read_text())).wait(timeout=10)

    def test_a_compiler_without_the_standard_is_named(self, folder, tmp_path, monkeypatch):
        old = tmp_path / "old-g++"
        old.write_text("#!/bin/sh\necho 'unrecognized option -std=gnu++20' >&2\nexit 1\n")
        old.chmod(0o755)
        monkeypatch.setenv("CXX", str(old))

        with pytest.raises(BuildError, match=r"(?s)old-g\+\+ cannot compile C\+\+20.*unrecognized"):
            build_wheel(RECIPE, folder)

    def test_a_missing_compiler_names_the_package_that_brings_it(
        self, folder, tmp_path, monkeypatch
    ):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(BuildError, match=r"apt-get install g\+\+"):
            build_wheel(RECIPE, folder)


class TestBuildHorovod:
    @pytest.fixture
    def builds(self, monkeypatch):
        """Replace the build by one that takes half a second; the list counts its runs."""
        runs = []

        def slow_build(recipe, folder, *, jobs, report):
            runs.append(recipe)
            time.sleep(0.5)
            return make_wheel(folder / WHEEL_NAME, f"build {len(runs)}")

        monkeypatch.setattr(build, "build_wheel", slow_build)
        return runs

    def test_a_second_call_finds_the_wheel(self, builds, tmp_path):
        first = build_horovod(cache_dir=tmp_path, install=False)
        second = build_horovod(cache_dir=tmp_path, install=False)

        assert first == second
        assert len(builds) == 1
        assert first.parent.parent.name == detect_recipe().key

    def test_force_builds_again(self, builds, tmp_path):
        build_horovod(cache_dir=tmp_path, install=False)
        wheel = build_horovod(cache_dir=tmp_path, install=False, force=True)

        assert zipfile.ZipFile(wheel).read("horovod/torch/__init__.py") == b"build 2"

    def test_a_wheel_that_an_earlier_version_built_is_finished_and_not_compiled(
        self, builds, tmp_path
    ):
        folder = tmp_path / "wheels" / detect_recipe().key
        folder.mkdir(parents=True)
        old = make_wheel(folder / WHEEL_NAME, "of before")

        wheel = build_horovod(cache_dir=tmp_path, install=False)

        assert builds == []
        assert wheel != old
        assert zipfile.ZipFile(wheel).read("horovod/torch/__init__.py") == b"of before"
        assert b"ImportError" in zipfile.ZipFile(wheel).read("horovod/spark/__init__.py")

    def test_of_two_calls_at_the_same_time_one_builds_and_the_other_waits(self, builds, tmp_path):
        lines = []
        calls = [
            threading.Thread(
                target=build_horovod,
                kwargs={"cache_dir": tmp_path, "install": False, "report": lines.append},
            )
            for _ in range(2)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()

        assert len(builds) == 1
        assert sum("waiting" in line for line in lines) == 1
        assert sum(line.startswith("found ") for line in lines) == 1

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path):
        (tmp_path / "file").touch()

        with pytest.raises(BuildError, match="HVD_ESTIMATORS_CACHE"):
            build_horovod(cache_dir=tmp_path / "file", install=False)

    def test_cache_dir_is_the_projects_variable_then_the_users_cache_folder(self, monkeypatch):
        monkeypatch.setenv("HVD_ESTIMATORS_CACHE", "/own")
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert default_cache_dir() == Path("/own")
        monkeypatch.delenv("HVD_ESTIMATORS_CACHE")
        assert default_cache_dir() == Path("/xdg/hvd_estimators")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert default_cache_dir() == Path("~/.cache/hvd_estimators")


class TestInstall:
    @pytest.fixture
    def installed_from(self, monkeypatch):
        """Make it look as if Horovod was installed from a wheel of these contents, and imports."""

        def pretend(content):
            hashes = {"sha256": hashlib.sha256(content).hexdigest()}
            note = json.dumps({"url": "file:///a.whl", "archive_info": {"hashes": hashes}})
            distribution = SimpleNamespace(read_text=lambda name: note)
            monkeypatch.setattr(build.metadata, "distribution", lambda name: distribution)
            monkeypatch.setattr(build, "_import_error", lambda recipe: None)

        return pretend

    def test_the_build_that_is_installed_is_not_installed_again(self, tmp_path, installed_from):
        wheel = tmp_path / WHEEL_NAME
        wheel.write_bytes(b"this build")
        installed_from(b"this build")
        lines = []

        install_wheel(wheel, RECIPE, report=lines.append)

        assert lines == ["already installed"]

    def test_another_build_of_the_same_version_is_installed(self, tmp_path, installed_from):
        wheel = tmp_path / WHEEL_NAME
        wheel.write_bytes(b"this build")
        installed_from(b"another build")

        # The file is no wheel, so pip is seen to be asked, and this environment stays as it is.
        with pytest.raises(BuildError, match=f"(?s)could not install .*{re.escape(WHEEL_NAME)}"):
            install_wheel(wheel, RECIPE)


class TestRedirect:
    @pytest.fixture
    def wheel(self, tmp_path):
        target = tmp_path / WHEEL_NAME.replace("cp311-cp311-linux_x86_64", "py3-none-any")
        redirect_horovod_spark(make_wheel(tmp_path / "compiled.whl", "x = 1"), target)
        return target

    def run(self, wheel, code, **environment):
        environment = {**os.environ, "PYTHONPATH": str(wheel), **environment}
        command = [sys.executable, "-S", "-c", code]
        return subprocess.run(command, text=True, capture_output=True, env=environment)

    @pytest.mark.parametrize(
        "code", ["import horovod.spark", "from horovod.spark.torch import TorchEstimator"]
    )
    def test_a_forgotten_import_is_told_where_to_go(self, wheel, code):
        done = self.run(wheel, code)

        assert done.returncode == 1
        message = done.stderr[done.stderr.index("ImportError:") :]
        for name in ("hvd_estimators.torch", "hvd_estimators.keras", "hvd_estimators.lightning"):
            assert name in message

    def test_the_rest_imports_and_the_old_package_when_it_is_asked_for(self, wheel):
        assert self.run(wheel, "import horovod.torch").stderr == ""
        assert (
            "the frozen"
            in self.run(
                wheel,
                "from horovod.spark.torch import TorchEstimator; print(TorchEstimator)",
                HVD_ESTIMATORS_HOROVOD_SPARK="1",
            ).stdout
        )

    def test_all_files_are_as_the_record_says(self, wheel):
        archive = zipfile.ZipFile(wheel)
        record = archive.read("horovod-0.28.1.dist-info/RECORD").decode()
        rows = {name: rest for name, *rest in csv.reader(record.splitlines())}

        assert rows.keys() == set(archive.namelist())
        for name, (digest, size) in rows.items():
            content = archive.read(name).decode()
            if digest:
                assert (digest, size) == (f"sha256={urlsafe_sha256(content)}", str(len(content)))

    def test_the_same_wheel_gives_the_same_bytes(self, tmp_path, wheel):
        redirect_horovod_spark(tmp_path / "compiled.whl", tmp_path / "again.whl")

        assert (tmp_path / "again.whl").read_bytes() == wheel.read_bytes()

    def test_another_wheel_is_refused(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "other.whl", "w") as other:
            other.writestr("other/__init__.py", "")

        with pytest.raises(BuildError, match="is not a wheel of Horovod"):
            redirect_horovod_spark(tmp_path / "other.whl", tmp_path / "target.whl")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other.whl"]
