"""The cache of Horovod wheels, and their installation."""

import hashlib
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
from horovod_wheels import RECIPE, WHEEL_NAME

from hvd_estimators.commands import build
from hvd_estimators.commands.build import (
    build_horovod,
    install_wheel,
)
from hvd_estimators.commands.toolchain import detect_recipe
from hvd_estimators.exceptions import BuildError


class TestBuildHorovod:
    @pytest.fixture
    def builds(self, monkeypatch):
        """Replace the build with one that takes half a second; the list counts its runs."""
        runs = []

        def slow_build(recipe, folder, *, jobs, report):
            runs.append(recipe)
            time.sleep(0.5)
            (folder / WHEEL_NAME).write_text(f"build {len(runs)}")
            return folder / WHEEL_NAME

        monkeypatch.setattr(build, "build_wheel", slow_build)
        return runs

    def test_a_second_call_finds_the_wheel(self, builds, tmp_path):
        first = build_horovod(cache_dir=tmp_path, install=False)
        second = build_horovod(cache_dir=tmp_path, install=False)

        assert first == second
        assert len(builds) == 1
        assert first.parent.name == detect_recipe().key

    def test_force_builds_again(self, builds, tmp_path):
        build_horovod(cache_dir=tmp_path, install=False)
        wheel = build_horovod(cache_dir=tmp_path, install=False, force=True)

        assert wheel.read_text() == "build 2"

    def test_compat_defaults_to_the_installed_state(self, builds, tmp_path, monkeypatch):
        def built(installed, **options):
            monkeypatch.setattr(build, "installed_horovod_spark", lambda: installed)
            build_horovod(cache_dir=tmp_path, install=False, force=True, **options)
            return builds[-1].compat

        assert [built("off"), built("compat"), built(None)] == [False, True, False]
        assert built("off", with_compat=True)
        assert not built("compat", with_compat=False)

    def test_one_of_two_concurrent_calls_builds_and_the_other_waits(self, builds, tmp_path):
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


class TestInstall:
    @pytest.fixture
    def installed_from(self, monkeypatch):
        """Pretend that Horovod was installed from a wheel with these contents and imports."""

        def pretend(content):
            hashes = {"sha256": hashlib.sha256(content).hexdigest()}
            note = json.dumps({"url": "file:///a.whl", "archive_info": {"hashes": hashes}})
            distribution = SimpleNamespace(read_text=lambda name: note)
            monkeypatch.setattr(build.metadata, "distribution", lambda name: distribution)
            monkeypatch.setattr(build, "_import_error", lambda recipe: None)

        return pretend

    def test_the_installed_build_is_not_installed_again(self, tmp_path, installed_from):
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

        # The file is not a wheel: pip fails visibly, and this environment does not change.
        with pytest.raises(BuildError, match=f"(?s)could not install .*{re.escape(WHEEL_NAME)}"):
            install_wheel(wheel, RECIPE)
