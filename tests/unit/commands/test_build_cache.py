"""The cache of Horovod wheels, and their installation."""

import re

import pytest
from horovod_wheels import RECIPE, WHEEL_NAME

from hvd_estimators.commands import build
from hvd_estimators.commands.build import build_horovod, install_wheel
from hvd_estimators.commands.toolchain import detect_recipe
from hvd_estimators.exceptions import BuildError


class TestBuildHorovod:
    @pytest.fixture
    def builds(self, monkeypatch):
        """Replace the build; the list counts its runs."""
        runs = []

        def build_file(recipe, folder, *, jobs):
            runs.append(recipe)
            (folder / WHEEL_NAME).write_text(f"build {len(runs)}")
            return folder / WHEEL_NAME

        monkeypatch.setattr(build, "build_wheel", build_file)
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


def test_a_file_that_pip_cannot_install_is_an_error(tmp_path):
    wheel = tmp_path / WHEEL_NAME
    wheel.write_bytes(b"no wheel")

    # pip fails visibly, and this environment does not change.
    with pytest.raises(BuildError, match=f"(?s)could not install .*{re.escape(WHEEL_NAME)}"):
        install_wheel(wheel, RECIPE)
