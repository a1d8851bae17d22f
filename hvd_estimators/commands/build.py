"""Build Horovod for the frameworks of this interpreter, cache the wheel, and install it.

``hvd-estimators build-horovod`` is the command. This module runs the build: the cache and
pip. `toolchain` determines the requirements of a build and finds them on the machine.
`horovod_source` changes the source before the build.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from hvd_estimators._util.import_path import python_code, python_module
from hvd_estimators._util.install_hints import BUILD_HOROVOD
from hvd_estimators.commands.horovod_source import PATCHES, write_build_files
from hvd_estimators.commands.toolchain import (
    NCCL_LIBRARY,
    SOURCE_SHA256,
    BuildRecipe,
    build_path,
    default_jobs,
    detect_recipe,
    find_compiler,
    find_cuda_toolkit,
    find_nccl,
    missing_build_packages,
)
from hvd_estimators.exceptions import BuildError
from hvd_estimators.launch.horovod_build import describe_build, installed_horovod_spark

_FIRST_ERRORS = 5
_TAIL_LINES = 20
_LINE_LENGTH = 200
_ERROR = re.compile(r"\berror\b:|CMake Error", re.IGNORECASE)
_TOOLS = "tools"
_SYSTEM_NCCL = "libnccl-dev, or HOROVOD_NCCL_HOME"


def run_logged(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, what: str
) -> None:
    """Run `command` with its output in a file."""
    # A separate process group, so that make and its compilers end with pip if the build is stopped.
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    if status:
        log = Path(output.name)
        raise BuildError(
            f"{what} failed with exit status {status}. Excerpt of {log}:\n{_digest(log)}"
        )


def _digest(log: Path) -> str:
    """Return the first compiler errors and the end of a log, with long lines cut."""
    lines = [line.strip()[:_LINE_LENGTH] for line in log.read_text(errors="replace").splitlines()]
    end = lines[-_TAIL_LINES:]
    errors = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)][:_FIRST_ERRORS]
    return "\n".join([*errors, *(["..."] if errors else []), *end])


def _report(line: str) -> None:
    # Standard output is for the path of the wheel alone.
    print(line, file=sys.stderr, flush=True)


def build_horovod(
    *,
    gpu: str = "auto",
    cache_dir: Path | None = None,
    force: bool = False,
    install: bool = True,
    jobs: int | None = None,
    with_compat: bool | None = None,
) -> Path:
    """Build Horovod for the installed frameworks, or find it in the cache, and install it.

    Parameters
    ----------
    gpu : {'auto', 'none', 'cuda'}
        ``auto`` builds for CUDA if torch was built with it and a CUDA toolkit is found.
    cache_dir : Path, optional
        The cache folder for wheels; `default_cache_dir` by default.
    force : bool
        Build even if the cache has the wheel.
    install : bool
        Install the wheel into this interpreter's environment.
    jobs : int, optional
        Number of compilers to run in parallel; by default as many as cores and memory allow.
    with_compat : bool, optional
        Whether the wheel's ``horovod.spark`` is `hvd_estimators.compat`. Otherwise it
        raises an ImportError that names the replacements. By default the setting of the installed
        Horovod.

    Returns
    -------
    Path
        The wheel in the cache.

    Raises
    ------
    DependencyError
        If no framework is installed in this environment.
    BuildError
        If the build could not start or failed; the message ends with the end of the build's log.
    """
    if with_compat is None:
        with_compat = installed_horovod_spark() == "compat"
    recipe = detect_recipe(gpu, with_compat)
    folder = (cache_dir or default_cache_dir()).expanduser().absolute() / "wheels" / recipe.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"Cannot keep wheels in {folder}: {error}. Name a folder that can be written: "
            "--cache-dir DIR, or HVD_ESTIMATORS_CACHE=DIR"
        ) from error
    _report(f"Horovod {recipe.horovod} for {describe_build(vars(recipe))}")
    wheel = None if force else _wheel_in(folder)
    if wheel:
        _report(f"found {wheel}")
    else:
        wheel = build_wheel(recipe, folder, jobs=jobs)
    if install:
        install_wheel(wheel, recipe)
    return wheel


def default_cache_dir() -> Path:
    """Return ``$HVD_ESTIMATORS_CACHE``, or ``hvd_estimators`` in the user's cache folder."""
    own = os.environ.get("HVD_ESTIMATORS_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hvd_estimators"


def build_wheel(
    recipe: BuildRecipe,
    folder: Path,
    *,
    jobs: int | None = None,
    pip: Sequence[str] = tuple(python_module("pip")),
) -> Path:
    """Build the recipe's wheel and move it into `folder` atomically.

    Parameters
    ----------
    recipe : BuildRecipe
        The recipe to build.
    folder : Path
        Folder of the cache that receives the wheel and ``build.log``.
    jobs : int, optional
        Number of compilers to run in parallel.
    pip : sequence of str
        The command that runs pip.

    Raises
    ------
    BuildError
        If a tool is missing, or pip failed; the message ends with the end of the log.
    """
    compiler = find_compiler()
    jobs = jobs or default_jobs()
    log = folder / "build.log"
    # Inside the cache, so that the move at the end stays on one file system.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent) as scratch:
        work = Path(scratch)
        environment = _prepare(work, recipe, compiler, jobs)
        with log.open("wb") as output:
            missing = missing_build_packages()
            if missing:
                _report(f"fetching build tools for this build only: {' '.join(missing)}")
                command = [*pip, "install", "--target", str(work / _TOOLS), *missing]
                run_logged(command, environment, output, "Fetching the build tools")
            source = _fetch_source(work, recipe, pip, environment, output)
            for patch in PATCHES:
                command = [*python_module("patch_ng"), "--directory", str(source), "--strip", "1"]
                run_logged([*command, str(patch)], environment, output, f"Applying {patch.name}")
            write_build_files(source, recipe.record())
            _report(f"compiling with {compiler} and {jobs} jobs, some minutes; log: {log}")
            if recipe.cuda:
                _report(f"  with NCCL from {find_nccl(recipe.cuda) or _SYSTEM_NCCL}")
            command = [*pip, "wheel", "--verbose", "--no-build-isolation", "--no-deps"]
            # pip's cache identifies a wheel by its name alone, not by the framework it was built
            # for.
            command += ["--no-cache-dir", "--wheel-dir", scratch, str(source)]
            run_logged(command, environment, output, f"Building for {describe_build(vars(recipe))}")
        built = _wheel_in(work)
        if built is None:
            raise BuildError(f"The build ended well but made no wheel; its log is {log}")
        wheel = folder / built.name
        os.replace(built, wheel)
    _report(f"built {wheel}")
    return wheel


def install_wheel(wheel: Path, recipe: BuildRecipe) -> None:
    """Install `wheel` into this interpreter's environment.

    Raises
    ------
    BuildError
        If pip failed, or Horovod cannot be imported afterwards.
    """
    _report(f"installing into {sys.prefix}")
    command = [*python_module("pip"), "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--force-reinstall", str(wheel)], text=True, capture_output=True
    )
    if done.returncode:
        raise BuildError(f"pip could not install {wheel}:\n{done.stderr.strip()}")
    error = _import_error(recipe)
    if error:
        raise BuildError(
            f"Horovod is installed but does not import:\n{error}\nIf the framework was built on "
            f"this machine, rebuild Horovod: {BUILD_HOROVOD} --force"
        )
    _report(f"installed; imports as {', '.join(f'horovod.{name}' for name in recipe.versions)}")


def _fetch_source(
    work: Path,
    recipe: BuildRecipe,
    pip: Sequence[str],
    environment: Mapping[str, str],
    output: BinaryIO,
) -> Path:
    """Download Horovod's source with pip, and unpack it; return its folder."""
    archives, unpacked = work / "archives", work / "source"
    unpacked.mkdir()
    # pip checks the hash before it runs any code of the source.
    wanted = work / "requirements.txt"
    wanted.write_text(f"horovod=={recipe.horovod} --hash=sha256:{SOURCE_SHA256}\n")
    command = [*pip, "download", "--no-build-isolation", "--no-deps", "--no-binary", "horovod"]
    command += ["--dest", str(archives), "--require-hashes", "--requirement", str(wanted)]
    run_logged(command, environment, output, "Fetching Horovod's source")
    for archive in archives.glob("horovod-*.tar.gz"):
        shutil.unpack_archive(archive, unpacked)
    return unpacked / f"horovod-{recipe.horovod}"


def _prepare(work: Path, recipe: BuildRecipe, compiler: str, jobs: int) -> dict[str, str]:
    """Write the compiler wrapper into `work` and return the environment of the build."""
    cxx = work / "cxx"
    cxx.write_text(recipe.compiler_wrapper(compiler))
    cxx.chmod(0o755)
    toolkit = find_cuda_toolkit() if recipe.cuda else None
    cuda_home = str(toolkit) if toolkit else None
    nccl = find_nccl(recipe.cuda) if recipe.cuda else None
    nccl_home = str(_linkable(nccl, work / "nccl")) if nccl else None
    tools = work / _TOOLS
    # The recipe determines frameworks and GPUs, so the user's variables for them are dropped.
    decided = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU_OPERATIONS")
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(decided)}
    return {
        **inherited,
        **recipe.environment(cxx=str(cxx), jobs=jobs, cuda_home=cuda_home, nccl_home=nccl_home),
        "PATH": build_path(tools / "bin"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.getenv("PYTHONPATH")])),
        "TMPDIR": str(work),
    }


def _linkable(nccl: Path, folder: Path) -> Path:
    """Return a folder of links for the linker, because NCCL's package has no ``libnccl.so``."""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(nccl / "include")
    (folder / "lib" / "libnccl.so").symlink_to(nccl / "lib" / NCCL_LIBRARY)
    return folder


def _wheel_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def _import_error(recipe: BuildRecipe) -> str | None:
    """Import Horovod in a separate process and return the end of its error, if any."""
    modules = ", ".join(f"horovod.{name}" for name in recipe.versions)
    done = subprocess.run(python_code(f"import {modules}"), text=True, capture_output=True)
    return done.stderr.strip()[-2000:] if done.returncode else None
