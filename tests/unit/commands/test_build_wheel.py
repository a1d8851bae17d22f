"""The build of Horovod with a stand-in for pip, without compiling Horovod itself."""

import hashlib
import sys
import tarfile

import patch_ng
import pytest
from horovod_wheels import PYTHON_PATCHES, RECIPE, WHEEL_NAME, make_source

from hvd_estimators.commands import build
from hvd_estimators.commands.build import build_wheel
from hvd_estimators.commands.toolchain import SOURCE_SHA256
from hvd_estimators.exceptions import BuildError
from hvd_estimators.launch.horovod_build import read_record


@pytest.fixture
def folder(tmp_path):
    """The folder of a wheel in an empty cache."""
    path = tmp_path / "wheels" / RECIPE.key
    path.mkdir(parents=True)
    return path


@pytest.fixture
def fake_pip(tmp_path, archive):
    """Return a factory of commands that stand in for ``python -m pip`` and run `body` to build.

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
def archive(tmp_path, monkeypatch):
    """Pack an archive with the lines of Horovod's source that the patches expect."""
    monkeypatch.setattr(build, "PATCHES", PYTHON_PATCHES)
    source = make_source(tmp_path / "horovod-0.28.1")
    packed = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(source, source.name)
    return packed


def no_wheels(folder):
    return not list(folder.parent.rglob("*.whl"))


def scratch_folders(folder):
    return list(folder.parent.glob(".build-*"))


class TestBuildWheel:
    def test_the_wheel_is_moved_into_the_cache_and_the_scratch_folder_deleted(
        self, folder, fake_pip
    ):
        pip = fake_pip(f"(wheel_dir / {WHEEL_NAME!r}).write_text('whole')")

        wheel = build_wheel(RECIPE, folder, pip=pip)

        assert wheel == folder / WHEEL_NAME
        assert wheel.read_text() == "whole"
        assert not scratch_folders(folder)

    def test_a_failed_build_reports_its_errors_and_leaves_no_wheel(self, folder, fake_pip):
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

    def test_the_patched_source_is_built(self, folder, fake_pip):
        pip = fake_pip(
            "source = pathlib.Path(sys.argv[-1])\n"
            f"(wheel_dir / {WHEEL_NAME!r}).write_text("
            "''.join(p.read_text() for p in source.rglob('*.py')))"
        )

        built = build_wheel(RECIPE, folder, pip=pip).read_text()

        for patch in PYTHON_PATCHES:
            for change in patch_ng.fromfile(str(patch)).items:
                for hunk in change.hunks:
                    lines = [line[1:].decode() for line in hunk.text if line[:1] in b" +"]
                    assert "".join(lines) in built, patch
        assert read_record(built[built.index("BUILD = {") :])["torch"] == RECIPE.torch

    def test_an_unknown_source_is_not_built(self, folder, fake_pip, archive):
        with tarfile.open(archive, "w:gz") as tar:
            setup = archive.with_name("setup.py")
            setup.touch()
            tar.add(setup, "horovod-0.28.1/setup.py")

        with pytest.raises(BuildError, match=r"(?s)Applying 12-\S+\.patch failed"):
            build_wheel(RECIPE, folder, pip=fake_pip("sys.exit('compiled')"))

        assert no_wheels(folder)
        assert not scratch_folders(folder)

    def test_a_source_with_another_hash_is_neither_run_nor_built(
        self, folder, tmp_path, archive, monkeypatch
    ):
        ran = tmp_path / "ran"
        with tarfile.open(archive, "w:gz") as tar:
            setup = archive.with_name("setup.py")
            setup.write_text(f"open({str(ran)!r}, 'w')")
            tar.add(setup, "horovod-0.28.1/setup.py")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()

        with pytest.raises(BuildError, match=rf"(?s)HASHES.*{SOURCE_SHA256}.*{found}"):
            build_wheel(RECIPE, folder)

        assert not ran.exists()
        assert no_wheels(folder)

    def test_a_failed_rebuild_keeps_the_previous_wheel(self, folder, fake_pip):
        (folder / WHEEL_NAME).write_text("from before")

        with pytest.raises(BuildError):
            build_wheel(RECIPE, folder, pip=fake_pip("sys.exit(1)"))

        assert (folder / WHEEL_NAME).read_text() == "from before"

    def test_a_missing_compiler_names_the_package_to_install(self, folder, tmp_path, monkeypatch):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(BuildError, match=r"apt-get install g\+\+"):
            build_wheel(RECIPE, folder)
