"""The doctor's diagnosis of given packages, and its probes on this machine."""

import contextlib
import json
from types import SimpleNamespace

import psutil
import pytest

from hvd_estimators.commands import doctor
from hvd_estimators.commands.doctor import (
    ProbeError,
    Row,
    Status,
    _output_of,
    diagnose,
    run_python,
)
from hvd_estimators.exceptions import DependencyError
from hvd_estimators.launch import horovod_build
from hvd_estimators.launch.horovod_build import REVISION, installed_revision
from hvd_estimators.launch.local_backend import LocalBackend

pytestmark = pytest.mark.versions

VERSIONS = {
    "pyspark": "3.5.9",
    "pyarrow": "14.0.2",
    "petastorm": "0.13.1",
    "torch": "2.13.0+cpu",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "lightning": "2.6.6",
    "horovod": "0.28.1",
}


class Machine:
    """Packages and programs that the doctor finds; tests change them."""

    def __init__(self):
        self.versions = dict(VERSIONS)
        self.record = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0", "cuda": None}
        self.errors = {}
        self.horovod_spark = "off"
        self.torch_cuda = None
        self.output = {}

    def installed_version(self, *names):
        return next((self.versions[name] for name in names if name in self.versions), None)

    def horovod_problem(self, framework):
        return None if framework in self.versions and "horovod" in self.versions else "it lacks it"

    def run_python(self, code, *, seconds, what):
        for module, error in self.errors.items():
            if module in code:
                raise ProbeError(error)

    def output_of(self, *command):
        return self.output.get(command[0].rpartition("/")[2], "")

    def which(self, program, path=None):
        return f"/bin/{program}" if program in self.output else None


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    found.output["java"] = 'openjdk version "17.0.15" 2025-04-15'
    for name in ("installed_version", "horovod_problem", "run_python"):
        monkeypatch.setattr(doctor, name, getattr(found, name))
    monkeypatch.setattr(doctor, "installed_record", lambda: found.record)
    monkeypatch.setattr(doctor, "installed_horovod_spark", lambda: found.horovod_spark)
    monkeypatch.setattr(doctor, "cuda_of", lambda framework: found.torch_cuda)
    monkeypatch.setattr(doctor, "_output_of", found.output_of)
    monkeypatch.setattr(doctor.shutil, "which", found.which)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return found


def row(component):
    (found,) = [row for row in diagnose() if row.component == component]
    return found


def problems():
    return {row.component for row in diagnose() if row.status is Status.PROBLEM}


def test_a_healthy_machine_has_no_problem(machine):
    assert not problems()
    assert row("Horovod for torch").found == (
        "0.28.1, for torch 2.13.0+cpu and TensorFlow 2.21.0, CPU"
    )


def test_a_horovod_that_does_not_match_its_framework_must_be_rebuilt(machine, monkeypatch):
    told = {"torch": "this Horovod was built without the patches that ranks need"}
    monkeypatch.setattr(doctor, "horovod_problem", told.get)

    assert problems() == {"Horovod for torch"}
    assert row("Horovod for torch").found == f"0.28.1: {told['torch']}"
    assert row("Horovod for torch").remedy == "hvd-estimators build-horovod --force"


def test_a_horovod_that_cannot_be_imported_must_be_rebuilt(machine):
    machine.errors["horovod.torch"] = "ImportError: undefined symbol"

    assert problems() == {"Horovod for torch"}
    assert "undefined symbol" in row("Horovod for torch").found


@pytest.mark.parametrize(
    ("kind", "status"), [("compat", Status.OK), ("off", Status.OK), ("frozen", Status.WARNING)]
)
def test_the_state_of_horovod_spark_is_reported(machine, kind, status):
    machine.horovod_spark = kind

    assert row("horovod.spark").status is status


def test_launchers_require_a_patched_horovod(tmp_path, monkeypatch):
    assert installed_revision() >= REVISION

    as_released = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(horovod_build, "find_spec", lambda name: as_released)
    assert installed_revision() == 0
    with pytest.raises(DependencyError, match="hvd-estimators build-horovod"):
        LocalBackend(1).check_horovod()


def test_json_contains_the_rows_of_the_table(machine, capsys):
    del machine.output["java"]

    assert doctor.main(as_json=True) == 1

    rows = json.loads(capsys.readouterr().out)
    found = [row["component"] for row in rows]
    assert found == ["Python", "Java", *(row.component for row in diagnose()), *["Allreduce"] * 2]
    (java,) = [row for row in rows if row["component"] == "Java"]
    assert java["status"] == "problem"
    assert "openjdk-17" in java["remedy"]


@pytest.mark.parametrize(
    ("pyspark", "java", "fits"),
    [
        ("3.5.9", "1.8.0_392", True),
        ("3.5.9", "11.0.21", True),
        ("3.5.9", "17.0.15", True),
        ("3.5.9", "21.0.2", False),
        ("4.3.0", "11.0.21", False),
        ("4.3.0", "17.0.15", True),
        ("4.3.0", "21-ea", True),
    ],
)
def test_the_java_version_must_suit_pyspark(machine, pyspark, java, fits):
    machine.versions["pyspark"] = pyspark
    machine.output["java"] = f'openjdk version "{java}" 2025-04-15'

    assert (doctor._java().status is Status.OK) == fits


@pytest.mark.parametrize(
    ("name", "version", "component"),
    [
        ("pyspark", "3.4.3", "PySpark"),
        ("pyarrow", "13.0.0", "PyArrow"),
        ("keras", "2.15.0", "Keras"),
        ("lightning", "1.9.5", "Lightning"),
    ],
)
def test_a_version_that_is_too_old_is_a_problem(machine, name, version, component):
    machine.versions[name] = version

    assert problems() == {component}


def test_a_required_package_that_is_missing_is_a_problem(machine):
    del machine.versions["pyarrow"], machine.versions["petastorm"]

    assert problems() == {"PyArrow"}
    assert row("PyArrow").remedy == 'pip install "pyarrow>=14"'
    assert row("Petastorm").status is Status.ABSENT


def test_tensorflow_trains_with_torch_or_horovod(machine):
    del machine.versions["horovod"]
    assert not problems()
    assert row("Horovod").status is Status.ABSENT

    del machine.versions["torch"]
    assert problems() == {"Training"}
    assert "[torch]" in row("Training").remedy
    assert "hvd-estimators build-horovod" in row("Training").remedy


def test_a_machine_without_frameworks_is_a_problem(machine):
    del machine.versions["torch"], machine.versions["tensorflow"]

    assert problems() == {"Frameworks"}
    assert "hvd_estimators>[torch]" in row("Frameworks").remedy


@pytest.mark.parametrize(
    ("component", "module"), [("torch", "import torch"), ("Petastorm", "petastorm.reader")]
)
def test_a_package_that_cannot_be_imported_is_a_problem(machine, component, module):
    machine.errors[module] = "OSError: libtorch.so: no such file"

    assert "libtorch.so: no such file" in row(component).found
    assert problems() == {component}


def test_a_failed_allreduce_is_a_problem(machine):
    machine.errors["print_sums('horovod.torch')"] = "a rank failed: connection refused"

    failed, works = doctor._allreduce(diagnose())

    remedy = "hvd-estimators build-horovod --force"
    told = Row("Allreduce", "a rank failed: connection refused", Status.PROBLEM, remedy)
    assert failed == told
    assert works.status is Status.OK
    assert works.found.endswith(" s with torch.distributed")


def test_programs_that_do_not_answer_are_problems(machine, monkeypatch):
    assert _output_of("sleep", "60", seconds=0.1) is None
    assert (_output_of("false"), _output_of("echo", "one")) == ("", "one\n")
    machine.output["nvidia-smi"] = "H100\n"
    monkeypatch.setattr(doctor, "_output_of", lambda *command: None)
    assert doctor._java().status is Status.PROBLEM
    assert problems() == {"GPUs"}
    assert row("GPUs").found == "nvidia-smi did not answer in 120 s"


@pytest.mark.parametrize(
    ("torch_cuda", "built", "status"),
    [(None, None, Status.WARNING), ("13.0", None, Status.WARNING), ("13.0", "13.0", Status.OK)],
)
def test_unusable_gpus_are_a_warning(machine, torch_cuda, built, status):
    machine.output["nvidia-smi"] = "H100\n"
    machine.torch_cuda, machine.record["cuda"] = torch_cuda, built

    assert row("GPUs").status is status
    assert row("GPUs").found.startswith("H100")
    assert problems() == set()


@pytest.mark.slow
def test_this_environment_is_healthy(capsys):
    status = doctor.main(as_json=True)

    found = json.loads(capsys.readouterr().out)
    rows = {row["component"]: row for row in found}
    assert status == 0, rows
    assert rows["Horovod for torch"]["status"] == "ok"
    assert rows["Horovod for tensorflow"]["status"] == "ok"
    assert [row["status"] for row in found if row["component"] == "Allreduce"] == ["ok", "ok"]


class TestRunPython:
    def test_a_failure_is_reported_with_its_last_line(self):
        with pytest.raises(ProbeError, match=r"a trial failed: ValueError: the cause$"):
            run_python("raise ValueError('the cause')", seconds=60, what="a trial")

    def test_child_processes_end_on_timeout(self, tmp_path):
        pid_file = tmp_path / "pid"
        script = "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
        script += f"open({str(pid_file)!r}, 'w').write(str(child.pid))\ntime.sleep(600)"

        with pytest.raises(ProbeError, match="did not end in 2 s"):
            run_python(script, seconds=2)

        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid_file.read_text())).wait(timeout=10)
