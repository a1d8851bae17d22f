"""A wheel of Horovod whose `horovod.spark` says where to go."""

import csv
import os
import subprocess
import sys
import zipfile

import pytest
from horovod_wheels import WHEEL_NAME, make_wheel, urlsafe_sha256

from hvd_estimators.commands.build_redirect import redirect_horovod_spark
from hvd_estimators.exceptions import BuildError


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
