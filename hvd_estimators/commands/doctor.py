"""Check the installation and suggest fixes.

``hvd-estimators doctor`` is the command. `collect` finds the facts about this machine and does not
judge them. `diagnose` turns facts into rows and does not inspect the machine. Imports run in
separate processes, because they may crash, hang or hold GPU memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from packaging.version import Version

from hvd_estimators._util.import_path import python_code
from hvd_estimators._util.install_hints import BUILD_HOROVOD, INSTALL, INSTALL_A_FRAMEWORK
from hvd_estimators.exceptions import HvdEstimatorsError, WorkerFailedError
from hvd_estimators.launch.horovod_build import (
    DISTRIBUTIONS,
    REQUIRED_REVISION,
    REVISION,
    cuda_of,
    difference,
    installed_horovod_spark,
    installed_record,
    installed_version,
)

if TYPE_CHECKING:
    from hvd_estimators.launch.backend import Backend

# Component, its name, and its oldest version, as the extras in setup.cfg.
_OPTIONAL = (
    ("Petastorm", "petastorm", "0.13"),
    ("torch", "torch", "2.6"),
    ("TensorFlow", "tensorflow", "2.16"),
    ("Keras", "keras", "3.5"),
    ("Lightning", "lightning", "2.4"),
)

# Component to the distributions that may provide it; the first match counts.
_COMPONENTS = {
    "pyspark": ("pyspark", "pyspark-connect", "pyspark-client"),
    "pyarrow": ("pyarrow",),
    "petastorm": ("petastorm",),
    **DISTRIBUTIONS,
    "keras": ("keras",),
    "lightning": ("pytorch-lightning", "lightning"),
    "horovod": ("horovod",),
}

_IMPORTED = {"petastorm": "petastorm.reader", "torch": "torch", "tensorflow": "tensorflow"}

_HOROVOD_SCRIPT = """\
import json
import horovod.{framework} as hvd
print(json.dumps({{name: bool(getattr(hvd, name + "_built")()) for name in {features}}}))
"""

_HOROVOD_FEATURES = ("gloo", "mpi", "nccl", "cuda")

_HOROVOD, _TORCH = "Horovod", "torch.distributed"

_IMPORT_SECONDS = 120.0

_ALLREDUCE_SECONDS = 120.0

_JAVA_COMMAND = "apt-get install openjdk-17-jre-headless, or set JAVA_HOME to an installed Java"

# https://spark.apache.org/docs/3.5.9/ and https://spark.apache.org/docs/latest/, "Downloading"
_JAVA_FOR_PYSPARK = {3: (8, 11, 17), 4: (17, 21)}


class ProbeError(HvdEstimatorsError):
    """A failed check of this machine; the message ends with the last line of its output."""


def run_python(code: str, *, seconds: float, what: str = "process") -> str:
    """Run a Python program and return the last line of its output.

    Parameters
    ----------
    code : str
        The program.
    seconds : float
        Time limit.
    what : str
        Name of the program in error messages.

    Raises
    ------
    ProbeError
        If the program failed or did not end in time. The message has the last line of its output.
    """
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        process = subprocess.Popen(python_code(code), env=env, start_new_session=True, **streams)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProbeError(f"{what} did not end in {seconds:g} s") from None
        finally:
            # It may have started others.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status:
            raise ProbeError(f"{what} failed: {_last_line(errors) or f'exit status {status}'}")
        return _last_line(output)


def two_rank_allreduce(module: str, *, seconds: float) -> float:
    """Let two ranks of a `LocalBackend` reduce a tensor, and return the duration in seconds.

    Parameters
    ----------
    module : {'horovod.torch', 'horovod.tensorflow', 'torch.distributed'}
        The module that reduces.
    seconds : float
        Time limit.

    Raises
    ------
    ProbeError
        If the ranks failed, got a wrong sum or did not end in time.
    """
    started = time.monotonic()
    # A separate program, which can be killed after the timeout.
    script = f"from hvd_estimators.commands import doctor; doctor.print_sums({module!r})"
    sums = run_python(script, seconds=seconds, what=f"an allreduce with {module}")
    check_sums(list(map(float, sums.split())), module)
    return time.monotonic() - started


def print_sums(module: str) -> None:
    """Print the sums that two ranks of this machine reduce, or exit with the cause of a failure."""
    # Otherwise the command line would import the launcher.
    from hvd_estimators.launch.local_backend import LocalBackend

    try:
        # The GPUs may be in use.
        print(*reduce_sums(LocalBackend(2, env={"CUDA_VISIBLE_DEVICES": ""}), module))
    except WorkerFailedError as error:
        traceback = str(error).partition("\nThe end of its output:")[0]
        sys.exit(f"rank {error.rank}: {traceback.splitlines()[-1]}")
    except HvdEstimatorsError as error:
        sys.exit(str(error))


def reduce_sums(backend: Backend, module: str) -> list[float]:
    """Return the sums that ranks get with a module, where each rank adds its number plus one."""
    return list(backend.run(_sum_with_torch if module == _TORCH else _sum_with_horovod, (module,)))


def check_sums(sums: Sequence[float], module: str) -> None:
    """Raise `ProbeError` if sums of `reduce_sums` are wrong."""
    expected = len(sums) * (len(sums) + 1) / 2
    if any(found != expected for found in sums):
        raise ProbeError(f"{len(sums)} ranks got the sums {sums} with {module}, not {expected}")


def _sum_with_horovod(module: str) -> float:
    """Add up a number of each rank. Runs on the ranks."""
    hvd = importlib.import_module(module)
    library = importlib.import_module(module.partition(".")[2])
    hvd.init()
    tensor = getattr(library, "tensor", None) or library.constant
    return float(hvd.allreduce(tensor([hvd.rank() + 1.0]), op=hvd.Sum)[0])


def _sum_with_torch(module: str) -> float:
    """Add up a number of each rank. Runs on the ranks."""
    dist = importlib.import_module(module)
    torch = importlib.import_module(module.partition(".")[0])
    dist.init_process_group("gloo")
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return float(tensor)


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return next((line.strip() for line in reversed(file.readlines()) if line.strip()), "")


@dataclass(frozen=True)
class HorovodFacts:
    """Horovod's support for one framework.

    Parameters
    ----------
    features : tuple of str
        The features of the build, out of gloo, mpi, nccl and cuda.
    error : str or None
        The error of the import, if it failed.
    """

    features: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """Facts about this machine.

    Parameters
    ----------
    python : str
        Python's version.
    java : str or None
        Version of the Java that PySpark would start.
    versions : mapping of str to str
        Version of each installed component.
    import_errors : mapping of str to str
        Last line of the error of each installed component that cannot be imported.
    horovod : mapping of str to HorovodFacts
        Per installed framework; empty without Horovod.
    horovod_record : mapping
        What the installed Horovod was built for, see `installed_record`.
    horovod_spark : str or None
        The kind of ``horovod.spark``, see `installed_horovod_spark`.
    torch_backends : tuple of str
        The backends of ``torch.distributed``, out of gloo and nccl.
    allreduce : mapping of str to float or ProbeError
        Seconds that two ranks took to start and reduce, or the error, with each library.
    gpus : tuple of str
        Names of NVIDIA GPUs.
    torch_cuda : str or None
        The CUDA version that torch was built with.
    """

    python: str
    java: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    import_errors: Mapping[str, str] = field(default_factory=dict)
    horovod: Mapping[str, HorovodFacts] = field(default_factory=dict)
    horovod_record: Mapping[str, Any] = field(default_factory=dict)
    horovod_spark: str | None = None
    torch_backends: tuple[str, ...] = ()
    allreduce: Mapping[str, float | ProbeError] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    torch_cuda: str | None = None


def collect(*, with_allreduce: bool = True) -> Facts:
    """Collect the facts about this machine; importing frameworks takes some seconds.

    Parameters
    ----------
    with_allreduce : bool
        Whether two ranks of this machine reduce with each library, which takes further seconds.
    """
    versions = {
        name: version
        for name, names in _COMPONENTS.items()
        if (version := installed_version(*names))
    }
    frameworks = [name for name in DISTRIBUTIONS if name in versions]
    with ThreadPoolExecutor(max_workers=2) as pool:
        horovod = {
            name: pool.submit(_horovod_facts, name) for name in frameworks if "horovod" in versions
        }
        builds = {name: future.result() for name, future in horovod.items()}
        # Horovod imports its framework, too.
        seen = [name for name, build in builds.items() if build.error is None]
        imports = {
            name: pool.submit(_import_error, module)
            for name, module in _IMPORTED.items()
            if name in versions and name not in seen
        }
    errors = {name: text for name, future in imports.items() if (text := future.result())}
    has_torch, torch_cuda = "torch" in versions and "torch" not in errors, cuda_of("torch")
    modules = {_HOROVOD: f"horovod.{seen[0]}"} if seen else {}
    modules |= {_TORCH: _TORCH} if has_torch else {}
    tried = modules.items() if with_allreduce else ()
    return Facts(
        python=platform.python_version(),
        java=_java_version(),
        versions=versions,
        import_errors=errors,
        horovod=builds,
        horovod_record=installed_record(),
        horovod_spark=installed_horovod_spark(),
        torch_backends=("gloo", *(["nccl"] if torch_cuda else [])) if has_torch else (),
        allreduce={name: _try_allreduce(module) for name, module in tried},
        gpus=_gpu_facts(),
        torch_cuda=torch_cuda,
    )


def _try_allreduce(module: str) -> float | ProbeError:
    try:
        return two_rank_allreduce(module, seconds=_ALLREDUCE_SECONDS)
    except ProbeError as error:
        return error


def _import_error(module: str) -> str | None:
    try:
        run_python(f"import {module}", seconds=_IMPORT_SECONDS, what=f"import {module}")
    except ProbeError as error:
        return str(error)
    return None


def _horovod_facts(framework: str) -> HorovodFacts:
    script = _HOROVOD_SCRIPT.format(framework=framework, features=_HOROVOD_FEATURES)
    try:
        what = f"import horovod.{framework}"
        output = run_python(script, seconds=_IMPORT_SECONDS, what=what)
    except ProbeError as error:
        return HorovodFacts(error=str(error))
    features = json.loads(output)
    return HorovodFacts(tuple(name for name, built in features.items() if built))


def _java_version() -> str | None:
    """Return the version of the Java that PySpark starts: JAVA_HOME's, else the one on PATH."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    if java is None:
        return None
    done = subprocess.run([java, "-version"], capture_output=True, text=True)
    match = re.search(r'version "([^"]+)"', done.stderr + done.stdout)
    return match.group(1) if match else None


def _gpu_facts() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return ()
    done = subprocess.run(command, capture_output=True, text=True)
    return tuple(done.stdout.split("\n")[:-1]) if done.returncode == 0 else ()


class Status(StrEnum):
    """Judgement of a component."""

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
        Name of the component.
    found : str
        A version, or a description of the problem.
    status : Status
        The judgement.
    remedy : str
        The command that fixes a problem or installs a missing component; empty if all is well.
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
        The facts to judge. By default they are collected from this machine, which takes some
        seconds.
    """
    rows = diagnose(facts or collect())
    print(json.dumps([asdict(row) for row in rows], indent=2) if as_json else table(rows))
    return int(any(row.status is Status.PROBLEM for row in rows))


def diagnose(facts: Facts) -> list[Row]:
    """Return one row per component, each problem with the command that fixes it."""
    return [
        _python(facts),
        _java(facts),
        _required(facts, "PySpark", "pyspark", "3.5"),
        _required(facts, "PyArrow", "pyarrow", "14"),
        *_frameworks(facts),
        *_horovod(facts),
        *_horovod_spark(facts),
        *_training(facts),
        *_allreduce(facts),
        _gpus(facts),
    ]


def diagnose_training(facts: Facts) -> list[Row]:
    """Return the rows about frameworks, Horovod, training and GPUs that are not optional."""
    rows = [*_frameworks(facts), *_horovod(facts), *_horovod_spark(facts), *_training(facts)]
    return [*(row for row in rows if row.status is not Status.ABSENT), _gpus(facts)]


def _python(facts: Facts) -> Row:
    if Version(facts.python) < Version("3.11"):
        return Row("Python", facts.python, Status.PROBLEM, "install Python 3.11 or newer")
    return Row("Python", facts.python)


def _java(facts: Facts) -> Row:
    pyspark = Version(facts.versions.get("pyspark", "3.5"))
    known = _JAVA_FOR_PYSPARK.get(pyspark.major, _JAVA_FOR_PYSPARK[max(_JAVA_FOR_PYSPARK)])
    if facts.java is not None and _java_major(facts.java) in known:
        return Row("Java", facts.java)
    found = f"{facts.java or 'none'}; PySpark {pyspark} runs on Java {', '.join(map(str, known))}"
    return Row("Java", found, Status.PROBLEM, _JAVA_COMMAND)


def _java_major(version: str) -> int:
    """Return Java's major version, such as 8 for ``1.8.0_392`` and 17 for ``17.0.15``."""
    numbers = version.split(".")
    return int(numbers[1] if numbers[0] == "1" else numbers[0].split("-")[0])


def _required(facts: Facts, component: str, name: str, minimum: str) -> Row:
    remedy = f'pip install "{name}>={minimum}"'
    row = _package(facts, component, name, minimum, remedy)
    return row or Row(component, "not installed", Status.PROBLEM, remedy)


def _frameworks(facts: Facts) -> Iterator[Row]:
    for component, name, minimum in _OPTIONAL:
        row = _package(facts, component, name, minimum, INSTALL[name])
        yield row or Row(component, "", Status.ABSENT, INSTALL[name])
    if not {"torch", "tensorflow"} & facts.versions.keys():
        found = "neither torch nor TensorFlow"
        yield Row("Frameworks", found, Status.PROBLEM, INSTALL_A_FRAMEWORK)


def _package(facts: Facts, component: str, name: str, minimum: str, remedy: str) -> Row | None:
    """Return the row of an installed package; None if it is not installed."""
    version, error = facts.versions.get(name), facts.import_errors.get(name)
    if version is None:
        return None
    if error:
        return Row(component, f"{version}: {error}", Status.PROBLEM, remedy)
    if Version(version) < Version(minimum):
        return Row(component, f"{version}, older than {minimum}", Status.PROBLEM, remedy)
    return Row(component, version)


def _horovod(facts: Facts) -> Iterator[Row]:
    version = facts.versions.get("horovod")
    if version is None:
        found = "training works without it" if "torch" in facts.versions else ""
        yield Row("Horovod", found, Status.ABSENT, BUILD_HOROVOD)
    for framework, build in facts.horovod.items():
        component = f"Horovod for {framework}"
        problem = _horovod_problem(facts, framework)
        if problem is not None:
            rebuilds = not build.error and "gloo" not in build.features
            remedy = f"{BUILD_HOROVOD} --force" if rebuilds else BUILD_HOROVOD
            yield Row(component, f"{version}: {problem}", Status.PROBLEM, remedy)
        elif facts.horovod_record["revision"] < REVISION:
            found = f"{version}, built without the newest patches"
            yield Row(component, found, Status.WARNING, BUILD_HOROVOD)
        else:
            yield Row(component, f"{version}, with {', '.join(build.features)}")


def _horovod_problem(facts: Facts, framework: str) -> str | None:
    """Return why Horovod cannot serve an installed framework; None if it can."""
    build = facts.horovod[framework]
    cuda = facts.torch_cuda if framework == "torch" else None
    if facts.horovod_record.get("revision", 0) < REQUIRED_REVISION:
        return "built without a patch that ranks need to reach each other"
    other = difference(facts.horovod_record, framework, facts.versions[framework], cuda)
    if other or build.error:
        return other or build.error
    return None if "gloo" in build.features else "built without Gloo"


def _training(facts: Facts) -> Iterator[Row]:
    """Yield the libraries with which the ranks of each estimator can reduce."""
    trained = (
        ("torch", "torch", "torch", ""),
        ("Lightning", "lightning", "torch", ""),
        ("Keras on TensorFlow", "keras", "tensorflow", "; KERAS_BACKEND=tensorflow"),
        ("Keras on torch", "keras", "torch", "; KERAS_BACKEND=torch"),
    )
    for title, name, framework, setting in trained:
        if not {name, framework} <= facts.versions.keys():
            continue
        component = f"Training, {title}"
        found = []
        if framework in facts.horovod and _horovod_problem(facts, framework) is None:
            found.append(f"{_HOROVOD} ({', '.join(facts.horovod[framework].features)})")
        # TensorFlow's tensors are reduced on the CPU.
        backends = [b for b in facts.torch_backends if framework == "torch" or b == "gloo"]
        if backends:
            found.append(f"{_TORCH} ({', '.join(backends)})")
        if found:
            yield Row(component, " or ".join(found) + setting)
        else:
            remedy = f"{INSTALL['torch']}, or {BUILD_HOROVOD}"
            yield Row(component, "needs torch or Horovod", Status.PROBLEM, remedy)


def _horovod_spark(facts: Facts) -> Iterator[Row]:
    component = "horovod.spark"
    if facts.horovod_spark == "compat":
        yield Row(component, "this package's names, in every process (--with-compat)")
    elif facts.horovod_spark == "off":
        found = "switched off; this package's where a program imports hvd_estimators.compat"
        yield Row(component, found)
    elif facts.horovod_spark == "frozen":
        found = "the package of 2023, which does not run on today's packages"
        yield Row(component, found, Status.WARNING, BUILD_HOROVOD)


def _allreduce(facts: Facts) -> Iterator[Row]:
    errors = {name: e for name, e in facts.allreduce.items() if isinstance(e, ProbeError)}
    if errors:
        remedy = f"{BUILD_HOROVOD} --force" if _HOROVOD in errors else INSTALL["torch"]
        yield Row("Allreduce", "; ".join(map(str, errors.values())), Status.PROBLEM, remedy)
    elif facts.allreduce:
        times = [f"{seconds:.1f} s with {name}" for name, seconds in facts.allreduce.items()]
        yield Row("Allreduce", f"two processes in {', '.join(times)}")


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


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a table, with each remedy below its row."""
    component = max(len(row.component) for row in rows)
    status = max(len(row.status.value) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.component:{component}}  {row.status.value:{status}}  {row.found}")
        if row.remedy:
            lines.append(f"{'':{component}}  {'':{status}}  -> {row.remedy}")
    return "\n".join(line.rstrip() for line in lines)
