"""Say what is installed, whether it fits together, and how to mend what does not.

``hvd-estimators doctor`` is the command. `doctor_probes` finds the facts; the functions here turn
them into rows, and know nothing of the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from packaging.version import Version

from hvd_estimators.commands.doctor_probes import Facts, collect
from hvd_estimators.commands.doctor_processes import ProbeError
from hvd_estimators.launch.mends import MENDS_REVISION, REQUIRED_MENDS
from hvd_estimators.remedies import BUILD_HOROVOD, INSTALL, INSTALL_A_FRAMEWORK

__all__ = ["Row", "Status", "diagnose", "main"]

_JAVA_COMMAND = "apt-get install openjdk-17-jre-headless, or set JAVA_HOME to an installed Java"

# https://spark.apache.org/docs/3.5.9/ and https://spark.apache.org/docs/latest/, "Downloading"
_JAVA_FOR_PYSPARK = {3: (8, 11, 17), 4: (17, 21)}


class Status(str, Enum):
    """How a component is judged."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    ABSENT = "not installed, optional"


@dataclass(frozen=True)
class Row:
    """One line of the diagnosis.

    Parameters
    ----------
    component : str
        What was looked at.
    found : str
        What was found: a version, or what is wrong.
    status : Status
        The judgement.
    remedy : str
        The command that mends a problem or installs what is absent; empty where all is well.
    """

    component: str
    found: str
    status: Status = Status.OK
    remedy: str = ""


def main(*, as_json: bool = False, facts: Facts | None = None) -> int:
    """Print the diagnosis and return the exit status: 1 if there is a problem, else 0.

    Parameters
    ----------
    as_json : bool
        Print a list of objects with the rows' fields instead of a table.
    facts : Facts, optional
        What to judge; by default this machine is looked at, which takes some seconds.
    """
    rows = diagnose(facts or collect())
    print(json.dumps([asdict(row) for row in rows], indent=2) if as_json else _table(rows))
    return int(any(row.status is Status.PROBLEM for row in rows))


def diagnose(facts: Facts) -> list[Row]:
    """Return one row per component, each problem with the command that mends it."""
    return [
        _python(facts),
        _java(facts),
        _required(facts, "PySpark", "pyspark", "3.5"),
        _required(facts, "PyArrow", "pyarrow", "14"),
        _petastorm(facts),
        *_frameworks(facts),
        *_horovod(facts),
        *_horovod_spark(facts),
        *_allreduce(facts),
        _gpus(facts),
    ]


def _python(facts: Facts) -> Row:
    if Version(facts.python) < Version("3.10"):
        return Row("Python", facts.python, Status.PROBLEM, "install Python 3.10 or newer")
    return Row("Python", facts.python)


def _java(facts: Facts) -> Row:
    pyspark = Version(facts.versions.get("pyspark", "3.5"))
    known = _JAVA_FOR_PYSPARK.get(pyspark.major, _JAVA_FOR_PYSPARK[max(_JAVA_FOR_PYSPARK)])
    wanted = f"PySpark {pyspark} runs on Java {', '.join(map(str, known))}"
    if facts.java is None:
        return Row("Java", f"none; {wanted}", Status.PROBLEM, _JAVA_COMMAND)
    if _java_major(facts.java) not in known:
        return Row("Java", f"{facts.java}; {wanted}", Status.PROBLEM, _JAVA_COMMAND)
    return Row("Java", facts.java)


def _java_major(version: str) -> int:
    """Return 8 for ``1.8.0_392`` and 17 for ``17.0.15``."""
    numbers = version.split(".")
    return int(numbers[1] if numbers[0] == "1" else numbers[0].split("-")[0])


def _required(facts: Facts, component: str, name: str, minimum: str) -> Row:
    remedy = f'pip install "{name}>={minimum}"'
    version = facts.versions.get(name)
    if version is None:
        return Row(component, "not installed", Status.PROBLEM, remedy)
    if Version(version) < Version(minimum):
        return Row(component, f"{version}, older than {minimum}", Status.PROBLEM, remedy)
    return Row(component, version)


def _petastorm(facts: Facts) -> Row:
    version = facts.versions.get("petastorm")
    if version is None:
        found = 'reading with data_module="arrow"'
        return Row("Petastorm", found, Status.ABSENT, INSTALL["petastorm"])
    error = facts.import_errors.get("petastorm")
    if error:
        found = (
            f"{version} cannot be imported beside PyArrow {facts.versions.get('pyarrow')} and "
            f"NumPy {facts.versions.get('numpy')}: {error}"
        )
        return Row("Petastorm", found, Status.PROBLEM, INSTALL["petastorm"])
    return Row("Petastorm", version)


def _frameworks(facts: Facts) -> Iterator[Row]:
    yield _framework(facts, "torch", "torch")
    yield _framework(facts, "TensorFlow", "tensorflow")
    yield _framework(facts, "Keras", "keras", minimum="3")
    yield _framework(facts, "Lightning", "lightning", minimum="2")
    if not {"torch", "tensorflow"} & facts.versions.keys():
        found = "neither torch nor TensorFlow"
        yield Row("Frameworks", found, Status.PROBLEM, INSTALL_A_FRAMEWORK)


def _framework(facts: Facts, component: str, name: str, minimum: str = "0") -> Row:
    remedy = INSTALL[name]
    version = facts.versions.get(name)
    if version is None:
        return Row(component, "", Status.ABSENT, remedy)
    error = facts.import_errors.get(name)
    if error:
        return Row(component, f"{version}: {error}", Status.PROBLEM, remedy)
    if Version(version) < Version(minimum):
        return Row(component, f"{version}, older than {minimum}", Status.PROBLEM, remedy)
    return Row(component, version)


def _horovod(facts: Facts) -> Iterator[Row]:
    version = facts.versions.get("horovod")
    if version is None:
        yield Row("Horovod", "not installed", Status.PROBLEM, BUILD_HOROVOD)
    for framework, build in facts.horovod.items():
        component = f"Horovod for {framework}"
        installed = facts.versions[framework]
        if build.built_for is not None and not _same_version(build.built_for, installed):
            found = f"{version}, built for {framework} {build.built_for}, not {installed}"
            yield Row(component, found, Status.PROBLEM, BUILD_HOROVOD)
        elif build.error:
            yield Row(component, f"{version}: {build.error}", Status.PROBLEM, BUILD_HOROVOD)
        elif "gloo" not in build.features:
            found = f"{version}, built without Gloo"
            yield Row(component, found, Status.PROBLEM, f"{BUILD_HOROVOD} --force")
        elif facts.horovod_mends < REQUIRED_MENDS:
            found = f"{version}, built without what ranks need to listen where others reach them"
            yield Row(component, found, Status.PROBLEM, BUILD_HOROVOD)
        elif facts.horovod_mends < MENDS_REVISION:
            found = f"{version}, does not notice ranks that hold up the others"
            yield Row(component, found, Status.WARNING, BUILD_HOROVOD)
        else:
            yield Row(component, f"{version}, with {', '.join(build.features)}")


def _horovod_spark(facts: Facts) -> Iterator[Row]:
    component = "horovod.spark"
    if facts.horovod_spark == "compat":
        yield Row(component, "this package's names, in every process (--with-compat)")
    elif facts.horovod_spark == "off":
        found = "switched off; this package's where a program imports hvd_estimators.compat"
        yield Row(component, found)
    elif facts.horovod_spark == "frozen":
        found = "that of 2023, which does not run on today's packages"
        yield Row(component, found, Status.WARNING, BUILD_HOROVOD)


def _same_version(one: str, other: str) -> bool:
    """Return whether two versions are the same, as far as both tell."""
    a, b = Version(one), Version(other)
    # A package that came from an index is 2.11.0 there, and 2.11.0+cu130 to itself.
    return a.public == b.public and (a.local == b.local or None in (a.local, b.local))


def _allreduce(facts: Facts) -> Iterator[Row]:
    if isinstance(facts.allreduce, ProbeError):
        remedy = f"{BUILD_HOROVOD} --force"
        yield Row("Allreduce", str(facts.allreduce), Status.PROBLEM, remedy)
    elif facts.allreduce is not None:
        yield Row("Allreduce", f"two processes in {facts.allreduce:.1f} s")


def _gpus(facts: Facts) -> Row:
    if not facts.gpus:
        return Row("GPUs", "none; training runs on CPUs", Status.ABSENT)
    names = ", ".join(facts.gpus)
    if "torch" in facts.versions and not facts.torch_cuda:
        remedy = f"install a CUDA build of torch, then {BUILD_HOROVOD} --gpu cuda"
        found = f"{names}; but torch {facts.versions['torch']} is built for CPUs"
        return Row("GPUs", found, Status.WARNING, remedy)
    if any("nccl" not in build.features for build in facts.horovod.values()):
        found = f"{names}; but Horovod is built without NCCL and reduces on CPUs"
        return Row("GPUs", found, Status.WARNING, f"{BUILD_HOROVOD} --gpu cuda")
    return Row("GPUs", names)


def _table(rows: Sequence[Row]) -> str:
    """Lay the rows out in columns, the remedies below what they mend."""
    component = max(len(row.component) for row in rows)
    status = max(len(row.status.value) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.component:{component}}  {row.status.value:{status}}  {row.found}")
        if row.remedy:
            lines.append(f"{'':{component}}  {'':{status}}  -> {row.remedy}")
    return "\n".join(line.rstrip() for line in lines)
