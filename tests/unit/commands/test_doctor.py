"""The doctor's diagnosis of given facts, and its probes on this machine."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from hvd_estimators.commands import doctor
from hvd_estimators.commands.doctor import (
    Facts,
    HorovodFacts,
    ProbeError,
    Status,
    diagnose,
    run_python,
    two_rank_allreduce,
)
from hvd_estimators.exceptions import DependencyError
from hvd_estimators.launch import horovod_build
from hvd_estimators.launch.horovod_build import (
    REQUIRED_REVISION,
    REVISION,
    installed_revision,
)
from hvd_estimators.launch.local_backend import LocalBackend

pytestmark = pytest.mark.versions

VERSIONS = {
    "pyspark": "3.5.9",
    "pyarrow": "14.0.2",
    "numpy": "1.26.4",
    "petastorm": "0.13.1",
    "torch": "2.13.0+cpu",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "lightning": "2.6.6",
    "horovod": "0.28.1",
}
HEALTHY = Facts(
    python="3.11.7",
    java="17.0.15",
    versions=VERSIONS,
    horovod={
        "torch": HorovodFacts(("gloo",)),
        "tensorflow": HorovodFacts(("gloo",)),
    },
    horovod_record={
        "torch": "2.13.0+cpu",
        "tensorflow": "2.21.0",
        "cuda": None,
        "revision": REVISION,
    },
    torch_backends=("gloo",),
    allreduce={"Horovod": 2.5, "torch.distributed": 1.5},
)


def without(facts, *names):
    """Return facts without some components."""
    return replace(
        facts,
        versions={name: version for name, version in facts.versions.items() if name not in names},
        horovod={name: found for name, found in facts.horovod.items() if name not in names},
    )


def with_version(facts, name, version):
    return replace(facts, versions={**facts.versions, name: version})


def row(facts, component):
    (found,) = [row for row in diagnose(facts) if row.component == component]
    return found


def problems(facts):
    return {row.component for row in diagnose(facts) if row.status is Status.PROBLEM}


def test_an_unpatched_horovod_is_a_problem():
    facts = replace(HEALTHY, horovod_record={})

    assert problems(facts) == {"Horovod for torch", "Horovod for tensorflow"}
    assert row(facts, "Horovod for torch").remedy == "hvd-estimators build-horovod"


def test_a_horovod_with_only_the_required_patches_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "REVISION", REQUIRED_REVISION + 1)
    facts = replace(HEALTHY, horovod_record={**HEALTHY.horovod_record, "revision": REVISION})

    assert not problems(facts)
    assert row(facts, "Horovod for torch").status is Status.WARNING
    assert row(facts, "Horovod for torch").remedy == "hvd-estimators build-horovod"


def test_the_state_of_horovod_spark_is_reported():
    for state, status in [("compat", Status.OK), ("off", Status.OK), ("frozen", Status.WARNING)]:
        assert row(replace(HEALTHY, horovod_spark=state), "horovod.spark").status is status
    assert "horovod.spark" not in {row.component for row in diagnose(HEALTHY)}


def test_launchers_require_a_patched_horovod(tmp_path, monkeypatch):
    assert installed_revision() >= REQUIRED_REVISION

    as_released = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(horovod_build, "find_spec", lambda name: as_released)
    assert installed_revision() == 0
    with pytest.raises(DependencyError, match="hvd-estimators build-horovod"):
        LocalBackend(1).check_horovod()


def test_json_contains_the_rows_of_the_table(capsys):
    facts = replace(HEALTHY, java=None)

    assert doctor.main(facts=facts, as_json=True) == 1

    rows = json.loads(capsys.readouterr().out)
    assert [row["component"] for row in rows] == [row.component for row in diagnose(facts)]
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
        ("4.3.0", None, False),
    ],
)
def test_the_java_version_must_suit_pyspark(pyspark, java, fits):
    facts = replace(with_version(HEALTHY, "pyspark", pyspark), java=java)

    assert (row(facts, "Java").status is Status.OK) == fits


@pytest.mark.parametrize(
    ("name", "version", "component"),
    [
        ("pyspark", "3.4.3", "PySpark"),
        ("pyarrow", "13.0.0", "PyArrow"),
        ("keras", "2.15.0", "Keras"),
        ("lightning", "1.9.5", "Lightning"),
    ],
)
def test_a_version_that_is_too_old_is_a_problem(name, version, component):
    assert problems(with_version(HEALTHY, name, version)) == {component}


def test_keras_trains_with_torch_or_horovod():
    facts = replace(without(HEALTHY, "horovod"), horovod={}, horovod_record={})

    assert not problems(facts)
    on_tensorflow, on_torch = "Training, Keras on TensorFlow", "Training, Keras on torch"
    gloo = "torch.distributed (gloo)"
    assert row(facts, on_tensorflow).found == f"{gloo}; KERAS_BACKEND=tensorflow"
    assert row(facts, on_torch).found == f"{gloo}; KERAS_BACKEND=torch"
    assert row(facts, "Training, torch").found == gloo
    assert row(facts, "Horovod").status is Status.ABSENT
    alone = replace(without(facts, "torch"), torch_backends=(), allreduce={})
    assert problems(alone) == {on_tensorflow}
    assert "[torch]" in row(alone, on_tensorflow).remedy
    assert "hvd-estimators build-horovod" in row(alone, on_tensorflow).remedy
    lean = without(facts, "tensorflow")
    assert not problems(lean)
    assert row(lean, on_torch).found == row(facts, on_torch).found
    assert on_tensorflow not in {row.component for row in diagnose(lean)}


def test_the_training_libraries_of_each_estimator_are_reported():
    facts = replace(HEALTHY, torch_backends=("gloo", "nccl"))

    both = "Horovod (gloo) or torch.distributed (gloo, nccl)"
    assert row(facts, "Training, torch").found == both
    assert row(facts, "Training, Lightning").found == both
    assert row(facts, "Training, Keras on torch").found == f"{both}; KERAS_BACKEND=torch"
    on_cpu = "Horovod (gloo) or torch.distributed (gloo); KERAS_BACKEND=tensorflow"
    assert row(facts, "Training, Keras on TensorFlow").found == on_cpu
    unusable = replace(without(facts, "horovod"), horovod={}, torch_backends=())
    estimators = ("torch", "Lightning", "Keras on TensorFlow", "Keras on torch")
    assert {f"Training, {each}" for each in estimators} <= problems(unusable)


def test_a_machine_without_frameworks_is_a_problem():
    facts = replace(without(HEALTHY, "torch", "tensorflow", "keras", "lightning"), allreduce={})

    assert problems(facts) == {"Frameworks"}
    assert "hvd_estimators>[torch]" in row(facts, "Frameworks").remedy


@pytest.mark.parametrize("component", ["torch", "Petastorm"])
def test_a_package_that_cannot_be_imported_is_a_problem(component):
    error = "OSError: libtorch.so: no such file"
    facts = replace(HEALTHY, import_errors={component.lower(): error})

    assert error in row(facts, component).found
    assert problems(facts) == {component}


@pytest.mark.parametrize(
    ("build", "record", "told"),
    [
        (HorovodFacts(("gloo",)), {"torch": "2.12.0"}, "for torch 2.12.0, installed is 2.13.0+cpu"),
        (HorovodFacts(("gloo",)), {"tensorflow": "2.21.0"}, "was built without torch"),
        (HorovodFacts(("gloo",)), {"torch": "2.13.0", "cuda": "13.0"}, "CUDA 13.0, installed is"),
        (HorovodFacts(error="ImportError: undefined symbol"), {}, "undefined symbol"),
        (HorovodFacts(("mpi",)), {}, "without Gloo"),
    ],
)
def test_a_horovod_that_does_not_match_its_framework_must_be_rebuilt(build, record, told):
    facts = replace(HEALTHY, horovod={**HEALTHY.horovod, "torch": build})
    if record:
        others = {"tensorflow": "2.21.0", "revision": REVISION}
        facts = replace(facts, horovod_record={**others, **record})

    assert problems(facts) == {"Horovod for torch"}
    assert told in row(facts, "Horovod for torch").found
    assert row(facts, "Horovod for torch").remedy.startswith("hvd-estimators build-horovod")


def test_a_failed_allreduce_is_a_problem():
    error = ProbeError("a rank failed: connection refused")
    for name, remedy in (("Horovod", "build-horovod --force"), ("torch.distributed", "pip")):
        facts = replace(HEALTHY, allreduce={**HEALTHY.allreduce, name: error})

        assert row(facts, "Allreduce").found == str(error)
        assert remedy in row(facts, "Allreduce").remedy
        assert problems(facts) == {"Allreduce"}


@pytest.mark.parametrize(
    ("torch_cuda", "features", "status"),
    [
        (None, ("gloo",), Status.WARNING),
        ("13.0", ("gloo",), Status.WARNING),
        ("13.0", ("gloo", "nccl", "cuda"), Status.OK),
    ],
)
def test_unusable_gpus_are_a_warning(torch_cuda, features, status):
    horovod = {name: replace(found, features=features) for name, found in HEALTHY.horovod.items()}
    facts = replace(HEALTHY, gpus=("H100",), torch_cuda=torch_cuda, horovod=horovod)

    assert row(facts, "GPUs").status is status
    assert problems(facts) == set()


@pytest.mark.slow
def test_this_environment_is_healthy(capsys):
    status = doctor.main(as_json=True)

    rows = {row["component"]: row for row in json.loads(capsys.readouterr().out)}
    assert status == 0, rows
    assert rows["Horovod for torch"]["status"] == "ok"
    assert rows["Horovod for tensorflow"]["status"] == "ok"
    assert rows["Allreduce"]["status"] == "ok"
    assert rows["Allreduce"]["found"].count(" s with ") == 2
    assert two_rank_allreduce("horovod.tensorflow", seconds=120) < 120


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
