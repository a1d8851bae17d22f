"""Horovod wheels whose `horovod.spark` redirects to this package."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
from horovod_wheels import RECIPE, WHEEL_NAME, is_as_recorded, make_wheel

from hvd_estimators._util.horovod_spark_names import HOMES
from hvd_estimators.commands.finished_wheel import finish_wheel, installed_horovod_spark
from hvd_estimators.exceptions import BuildError
from hvd_estimators.launch import horovod_build


def finished(tmp_path, with_compat=False):
    compiled = make_wheel(tmp_path / WHEEL_NAME, "x = 1")
    return finish_wheel(compiled, tmp_path, RECIPE.record(), with_compat)


def run(wheel, code, *flags, **environment):
    environment = {**os.environ, "PYTHONPATH": str(wheel), **environment}
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, text=True, capture_output=True, env=environment)


class TestRedirect:
    @pytest.fixture
    def wheel(self, tmp_path):
        return finished(tmp_path)

    def run(self, wheel, code, **environment):
        return run(wheel, code, "-S", **environment)

    @pytest.mark.parametrize(
        "code", ["import horovod.spark", "from horovod.spark.torch import TorchEstimator"]
    )
    def test_importing_horovod_spark_names_the_replacements(self, wheel, code):
        done = self.run(wheel, code)

        assert done.returncode == 1
        message = done.stderr[done.stderr.index("ImportError:") :]
        for name in ("hvd_estimators.torch", "hvd_estimators.keras", "hvd_estimators.lightning"):
            assert name in message

    def test_other_modules_import_and_so_does_the_old_package_on_request(self, wheel):
        assert self.run(wheel, "import horovod.runner").stderr == ""
        assert (
            "the frozen"
            in self.run(
                wheel,
                "from horovod.spark.torch import TorchEstimator; print(TorchEstimator)",
                HVD_ESTIMATORS_HOROVOD_SPARK="1",
            ).stdout
        )

    def test_all_files_match_the_record(self, wheel):
        assert is_as_recorded(wheel)

    def test_another_wheel_is_rejected(self, tmp_path):
        with zipfile.ZipFile(tmp_path / WHEEL_NAME, "w") as other:
            other.writestr("other/__init__.py", "")

        with pytest.raises(BuildError, match="is not a wheel of Horovod"):
            finish_wheel(tmp_path / WHEEL_NAME, tmp_path, RECIPE.record())
        assert sorted(path.name for path in tmp_path.iterdir()) == [WHEEL_NAME]


class TestWithCompat:
    @pytest.fixture
    def wheel(self, tmp_path):
        return finished(tmp_path, with_compat=True)

    def test_importing_horovod_spark_finds_this_package_without_setup(self, wheel):
        real = importlib.util.find_spec("horovod").submodule_search_locations[0]
        code = (
            f"import horovod; horovod.__path__.append({real!r})  # for horovod.runner\n"
            "import horovod.spark.common.store as store, horovod.spark, sys\n"
            "from horovod.spark.common import constants\n"
            "print(store.Store.__module__, store.__name__, horovod.spark.__name__)\n"
            "print(horovod.spark is sys.modules['hvd_estimators.compat.spark'], horovod.__file__)"
        )
        done = run(wheel, code, PYTHONPATH=os.pathsep.join([str(wheel), *sys.path]))

        first, second = done.stdout.splitlines()
        spark = "hvd_estimators.compat.spark"
        assert first == f"hvd_estimators.store.base {spark}.common.store {spark}"
        assert second == f"True {wheel}/horovod/__init__.py"

    def test_modules_of_the_frozen_package_are_replaced_by_ours(self, wheel):
        files = {
            name: zipfile.ZipFile(wheel).read(name).decode()
            for name in zipfile.ZipFile(wheel).namelist()
            if "/spark/" in name
        }

        packages = {"", "common/", "keras/", "lightning/", "task/", "torch/"}
        assert {name for name in files if name.endswith("/__init__.py")} == {
            f"horovod/spark/{package}__init__.py" for package in packages
        }
        assert len(files) == len(HOMES)
        assert is_as_recorded(wheel)
        assert files["horovod/spark/torch/__init__.py"].splitlines()[1:] == [
            "from hvd_estimators.compat.torch import TorchEstimator as TorchEstimator",
            "from hvd_estimators.torch.model import TorchModel as TorchModel",
        ]
        for file, text in files.items():
            for line in text.splitlines():
                if line.startswith("from ") and "petastorm" not in line:
                    exec(compile(line, file, "exec"), {})

    def test_the_frozen_package_is_not_available_on_request(self, wheel):
        done = run(wheel, "import horovod.spark", HVD_ESTIMATORS_HOROVOD_SPARK="1")

        assert "ImportError: HVD_ESTIMATORS_HOROVOD_SPARK=1" in done.stderr
        assert "--without-compat" in done.stderr

    def test_other_modules_are_unchanged(self, wheel):
        assert run(wheel, "import horovod.runner", "-S").stderr == ""


@pytest.mark.parametrize(
    ("with_compat", "expected"), [(None, "frozen"), (False, "off"), (True, "compat")]
)
def test_the_installed_state_is_detected_without_importing_it(
    tmp_path, monkeypatch, with_compat, expected
):
    if with_compat is None:
        wheel = make_wheel(tmp_path / "compiled.whl", "x = 1")
    else:
        wheel = finished(tmp_path, with_compat)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "site" / "horovod")])
    monkeypatch.setattr(horovod_build, "find_spec", lambda name: found)

    assert installed_horovod_spark() == expected
    monkeypatch.setattr(horovod_build, "find_spec", lambda name: None)
    assert installed_horovod_spark() is None
