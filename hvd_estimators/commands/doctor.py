"""Check the installation and suggest fixes: ``hvd-estimators doctor``.

Imports and ranks run in separate processes, because they may crash, hang or hold GPU memory.
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
from dataclasses import asdict, dataclass
from enum import StrEnum
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from packaging.version import Version

from hvd_estimators._util.import_path import python_code
from hvd_estimators._util.install_hints import BUILD_HOROVOD, INSTALL, INSTALL_A_FRAMEWORK
from hvd_estimators.exceptions import HvdEstimatorsError
from hvd_estimators.launch.horovod_build import (
    DISTRIBUTIONS,
    cuda_of,
    describe_build,
    horovod_problem,
    installed_horovod_spark,
    installed_record,
    installed_version,
)

if TYPE_CHECKING:
    from hvd_estimators.launch.backend import Backend

# Package, its oldest version as the extras in setup.cfg, and its distributions if there are others.
_REQUIRED = (("PySpark", "3.5", ("pyspark", "pyspark-connect")), ("PyArrow", "14", ("pyarrow",)))
_OPTIONAL = (
    ("Petastorm", "0.13", ("petastorm",)),
    ("torch", "2.6", DISTRIBUTIONS["torch"]),
    ("TensorFlow", "2.16", DISTRIBUTIONS["tensorflow"]),
    ("Keras", "3.5", ("keras",)),
    ("Lightning", "2.4", ("lightning", "pytorch-lightning")),
)

# Modules that may not import although their packages are installed.
_IMPORTED = {"Petastorm": "petastorm.reader", "torch": "torch", "TensorFlow": "tensorflow"}

_TORCH = "torch.distributed"
_SECONDS = 120.0
_KILL_SECONDS = 5.0

_JAVA_COMMAND = "apt-get install openjdk-17-jre-headless, or set JAVA_HOME to an installed Java"

# https://spark.apache.org/docs/3.5.9/ and https://spark.apache.org/docs/latest/, "Downloading"
_JAVA_FOR_PYSPARK = {3: (8, 11, 17), 4: (17, 21)}

_HOROVOD_SPARK = {
    "compat": "this package's names, in every process (--with-compat)",
    "off": "switched off; this package's where a program imports hvd_estimators.compat",
    "frozen": "the package of 2023, which does not run on today's packages",
}


class ProbeError(HvdEstimatorsError):
    """A failed check of this machine; the message ends with the last line of its output."""


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


def main(*, as_json: bool = False) -> int:
    """Print the diagnosis of this machine; return the exit status, 1 if there is a problem.

    Parameters
    ----------
    as_json : bool
        Print a list of objects with the rows' fields instead of a table.
    """
    rows = [Row("Python", platform.python_version()), _java(), *diagnose()]
    rows += _allreduce(rows)
    print(json.dumps([asdict(row) for row in rows], indent=2) if as_json else table(rows))
    return int(any(row.status is Status.PROBLEM for row in rows))


def diagnose() -> list[Row]:
    """Return one row per package, each problem with the command that fixes it."""
    versions = {
        title: version
        for title, _, names in (*_REQUIRED, *_OPTIONAL)
        if (version := installed_version(*names))
    }
    errors = _import_errors(versions)
    rows = []
    for title, minimum, names in (*_REQUIRED, *_OPTIONAL):
        is_required = (title, minimum, names) in _REQUIRED
        command = f'pip install "{names[0]}>={minimum}"' if is_required else INSTALL[names[0]]
        rows.append(_package(title, minimum, versions.get(title), errors.get(title), command))
        if rows[-1].status is Status.ABSENT and is_required:
            rows[-1] = Row(title, "not installed", Status.PROBLEM, command)
    if not {"torch", "TensorFlow"} & versions.keys():
        found = "neither torch nor TensorFlow"
        rows.append(Row("Frameworks", found, Status.PROBLEM, INSTALL_A_FRAMEWORK))
    rows += _horovod(versions, errors)
    rows.append(_gpus(versions))
    return rows


def _package(title: str, minimum: str, version: str | None, error: str | None, command: str) -> Row:
    if version is None:
        return Row(title, "", Status.ABSENT, command)
    if error:
        return Row(title, f"{version}: {error}", Status.PROBLEM, command)
    if Version(version) < Version(minimum):
        return Row(title, f"{version}, older than {minimum}", Status.PROBLEM, command)
    return Row(title, version)


def _import_errors(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the last line of the error of each module that cannot be imported."""
    modules = {title: module for title, module in _IMPORTED.items() if title in versions}
    modules |= {
        f"horovod.{name}": f"horovod.{name}"
        for name in DISTRIBUTIONS
        if horovod_problem(name) is None
    }

    def error(module: str) -> str:
        try:
            run_python(f"import {module}", seconds=_SECONDS, what=f"import {module}")
        except ProbeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(modules, pool.map(error, modules.values()), strict=True))


def _horovod(versions: Mapping[str, str], errors: Mapping[str, str]) -> Iterator[Row]:
    version = installed_version("horovod")
    if version is None:
        found = "training works without it" if "torch" in versions else ""
        yield Row("Horovod", found, Status.ABSENT, BUILD_HOROVOD)
        if "torch" not in versions and "TensorFlow" in versions:
            remedy = f"{INSTALL['torch']}, or {BUILD_HOROVOD}"
            yield Row("Training", "TensorFlow needs torch or Horovod", Status.PROBLEM, remedy)
        return
    for name in (each for each, names in DISTRIBUTIONS.items() if installed_version(*names)):
        problem = horovod_problem(name) or errors[f"horovod.{name}"]
        if problem:
            found = f"{version}: {problem}"
            yield Row(f"Horovod for {name}", found, Status.PROBLEM, f"{BUILD_HOROVOD} --force")
        else:
            yield Row(f"Horovod for {name}", f"{version}, for {describe_build(installed_record())}")
    kind = installed_horovod_spark()
    if kind is not None:
        is_old = kind == "frozen"
        status, remedy = (Status.WARNING, BUILD_HOROVOD) if is_old else (Status.OK, "")
        yield Row("horovod.spark", _HOROVOD_SPARK[kind], status, remedy)


def _java() -> Row:
    """Judge the Java that PySpark starts: JAVA_HOME's, else the one on PATH."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    found = "none"
    if java is not None:
        match = re.search(r'version "([^"]+)"', _output_of(java, "-version") or "")
        found = match.group(1) if match else "unknown"
    pyspark = Version(installed_version(*_REQUIRED[0][2]) or "3.5")
    known = _JAVA_FOR_PYSPARK.get(pyspark.major, _JAVA_FOR_PYSPARK[max(_JAVA_FOR_PYSPARK)])
    # Java 8 is 1.8, and a preview is 21-ea.
    if re.split(r"[.-]", found.removeprefix("1."))[0] in map(str, known):
        return Row("Java", found)
    found += f"; PySpark {pyspark} runs on Java {', '.join(map(str, known))}"
    return Row("Java", found, Status.PROBLEM, _JAVA_COMMAND)


def _gpus(versions: Mapping[str, str]) -> Row:
    names = []
    if shutil.which("nvidia-smi"):
        output = _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        if output is None:
            found = f"nvidia-smi did not answer in {_SECONDS:.0f} s"
            return Row("GPUs", found, Status.PROBLEM, "restart the machine or its GPU driver")
        names = output.splitlines()
    if not names:
        return Row("GPUs", "none; training runs on CPUs", Status.ABSENT)
    found = ", ".join(names)
    if "torch" in versions and not cuda_of("torch"):
        remedy = f"install a CUDA build of torch, then {BUILD_HOROVOD} --gpu cuda"
        found += f"; but torch {versions['torch']} is built for CPUs"
        return Row("GPUs", found, Status.WARNING, remedy)
    if installed_version("horovod") and not installed_record().get("cuda"):
        found += "; but Horovod is built without NCCL and reduces on CPUs"
        return Row("GPUs", found, Status.WARNING, f"{BUILD_HOROVOD} --gpu cuda")
    return Row("GPUs", found)


def _allreduce(rows: Sequence[Row]) -> Iterator[Row]:
    """Let two ranks of this machine reduce with each library that works."""
    working = {row.component for row in rows if row.status is not Status.PROBLEM and row.found}
    horovod = [name for name in DISTRIBUTIONS if f"Horovod for {name}" in working]
    modules = {f"horovod.{name}": f"{BUILD_HOROVOD} --force" for name in horovod[:1]}
    modules |= {_TORCH: INSTALL["torch"]} if "torch" in working else {}
    for module, remedy in modules.items():
        started = time.monotonic()
        script = f"from hvd_estimators.commands import doctor; doctor.print_sums({module!r})"
        try:
            run_python(script, seconds=_SECONDS, what=f"an allreduce with {module}")
        except ProbeError as error:
            yield Row("Allreduce", str(error), Status.PROBLEM, remedy)
            continue
        seconds = time.monotonic() - started
        yield Row("Allreduce", f"two processes in {seconds:.1f} s with {module}")


def _output_of(*command: str, seconds: float = _SECONDS) -> str | None:
    """Return a program's output; empty if it fails, and None if it does not end in time."""
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # It is not awaited: a process that waits for a broken device cannot be killed.
            process.kill()
            return None
        output.seek(0)
        return "" if status else output.read()


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
            # A process that waits for a broken device cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)
        if status:
            raise ProbeError(f"{what} failed: {_last_line(errors) or f'exit status {status}'}")
        return _last_line(output)


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return next((line.strip() for line in reversed(file.readlines()) if line.strip()), "")


def print_sums(module: str) -> None:
    """Print the sums that two ranks of this machine reduce, or exit with the cause of a failure."""
    # Otherwise the command line would import the launcher.
    from hvd_estimators.launch.local_backend import LocalBackend

    try:
        # The GPUs may be in use.
        print(*reduce_sums(LocalBackend(2, env={"CUDA_VISIBLE_DEVICES": ""}), module))
    except HvdEstimatorsError as error:
        sys.exit(str(error).splitlines()[0])


def reduce_sums(backend: Backend, module: str) -> list[float]:
    """Return the sums that ranks get with a module, where each rank adds its number plus one.

    Raises
    ------
    ProbeError
        If a sum is wrong.
    """
    sums = list(backend.run(_sum_with_torch if module == _TORCH else _sum_with_horovod, (module,)))
    expected = len(sums) * (len(sums) + 1) / 2
    if any(found != expected for found in sums):
        raise ProbeError(f"{len(sums)} ranks got the sums {sums} with {module}, not {expected}")
    return sums


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
