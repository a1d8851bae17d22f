"""Probes of one executor for ``hvd-estimators doctor --cluster``. Runs in Spark tasks.

The driver sends `survey` and `verify` by value, as `task_of` returns them, because an executor may
lack this package. So their code imports only the standard library and PyArrow, which Spark itself
needs. Each probe that needs this package runs in another process, with a time limit.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import os
import pickle
import platform
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

REACH_SECONDS = 10.0
"""Time limit of a host's connections to all others."""

PROGRAM_SECONDS = 60.0
"""Time limit of a probe in another process, except for `INSTALLATION_SECONDS`."""

INSTALLATION_SECONDS = 150.0
"""Time limit for the imports of all frameworks."""

# A listener outlives its task, and ends some time after the host's second task.
_LISTENER_SECONDS = 400.0
_LISTENER_LATE = 20.0

_UNSEEN = "does not see it"

Probe = Callable[..., Iterator[Any]]


def task_of(name: str) -> Probe:
    """Return a task of this module that does not need this package on the executor."""
    # Functions of __main__ are pickled by value.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(inspect.getsource(sys.modules[__name__]), namespace)
    task: Probe = namespace[name]
    return task


def survey(batches: Iterator[Any], *, request: Mapping[str, Any]) -> Iterator[Any]:
    """Yield facts about this host, and leave a listener that the other hosts connect to.

    Parameters
    ----------
    batches : iterator
        Not used.
    request : mapping
        ``id`` of this check, names of ``packages``, ``seconds`` to stay in the task slot, so that
        no other task of the check gets it, the ``driver``'s address, ``nics``, and ``store`` (see
        `check_store`) or None.
    """
    for _ in batches:
        pass
    started, hold = time.time(), time.monotonic() + request["seconds"]
    facts = {**_host_facts(), "versions": _versions(request["packages"]), "error": None}
    try:
        import hvd_estimators

        facts["versions"]["hvd_estimators"] = hvd_estimators.__version__
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    folder = _folder(request["id"], facts["identity"])
    if facts["error"] is None and _is_first(folder):
        with ThreadPoolExecutor() as pool:
            calls = {
                "installation": pool.submit(_call, "print_installation", {}, INSTALLATION_SECONDS),
                "listener": pool.submit(_start_listener, folder, request),
            }
            if request["store"] is not None:
                given = {**request["store"], "write": file_of(facts["identity"]), "read": []}
                calls["store"] = pool.submit(_call, "check_store", given, PROGRAM_SECONDS)
            facts.update({name: call.result() for name, call in calls.items()})
    time.sleep(max(hold - time.monotonic(), 0))
    yield _batch({**facts, "started": started, "ended": time.time()})


def verify(batches: Iterator[Any], *, request: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what this host reaches and reads of the other hosts.

    Parameters
    ----------
    batches : iterator
        Not used.
    request : mapping
        As for `survey`, and identities: the ``hosts`` that import this package, the ``writers`` to
        the store, and the ``listeners`` with their candidates.
    """
    for _ in batches:
        pass
    started, hold = time.time(), time.monotonic() + request["seconds"]
    facts = _host_facts()
    own, folder = facts["identity"], _folder(request["id"], facts["identity"])
    if own in request["hosts"] and _is_first(f"{folder}-verify"):
        others = {host: given for host, given in request["listeners"].items() if host != own}
        with ThreadPoolExecutor() as pool:
            limit = REACH_SECONDS + PROGRAM_SECONDS
            calls = {"reached": pool.submit(_call, "print_reached", others, limit)}
            if request["store"] is not None:
                names = ["driver", *(file_of(host) for host in request["writers"] if host != own)]
                given = {**request["store"], "write": None, "read": names}
                calls["store"] = pool.submit(_call, "check_store", given, PROGRAM_SECONDS)
            facts.update({name: call.result() for name, call in calls.items()})
        time.sleep(max(hold - time.monotonic(), 0))
        for path in (folder, f"{folder}-verify"):
            shutil.rmtree(path, ignore_errors=True)
    time.sleep(max(hold - time.monotonic(), 0))
    yield _batch({**facts, "started": started, "ended": time.time()})


def file_of(identity: str) -> str:
    """Return the name of the file that a host writes to the store."""
    return f"host-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _host_facts() -> dict[str, Any]:
    # The same parts as `hvd_estimators.launch.task.addresses.host_identity`.
    boot = network = ""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.readlink("/proc/self/ns/net")
    name = socket.gethostname()
    return {
        "identity": f"{boot} {network} {name}",
        "name": name,
        "python": platform.python_version(),
        "executable": sys.executable,
    }


def _versions(packages: list[str]) -> dict[str, str]:
    import pyspark

    # Spark's own folder may provide PySpark, without metadata.
    versions = {"pyspark": pyspark.__version__}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package).partition("+")[0]
    return versions


def _folder(check: str, identity: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"hvd-doctor-{check}-{file_of(identity)}")


def _is_first(folder: str) -> bool:
    """Return whether no other task of this host has made the folder."""
    try:
        os.mkdir(folder, 0o700)
    except OSError:
        return False
    return True


def _batch(facts: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_pydict({"facts": [json.dumps(facts)]})


def _program(function: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of another process that calls a function."""
    from pyspark import SparkFiles

    from hvd_estimators._util.import_path import python_code, python_path

    code = f"from hvd_estimators.commands import cluster_probe; cluster_probe.{function}()"
    path = python_path(sys.path, trusted=[SparkFiles.getRootDirectory()])
    return python_code(code), {**os.environ, "PYTHONPATH": path}


def _call(function: str, given: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Call a function in another process; return what it prints, or the error."""
    command, env = _program(function)
    try:
        done = subprocess.run(
            command,
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {seconds:g} s"}
    lines = [
        line for line in (done.stderr if done.returncode else done.stdout).splitlines() if line
    ]
    if done.returncode or not lines:
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _start_listener(folder: str, request: Mapping[str, Any]) -> dict[str, Any]:
    command, env = _program("listen")
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError), process.stdin:
        given = {"folder": folder, "nics": request["nics"], "driver": request["driver"]}
        process.stdin.write(json.dumps(given).encode())
    ready, _, _ = select.select([process.stdout], [], [], PROGRAM_SECONDS)
    line = process.stdout.readline() if ready else b""
    if not line:
        process.kill()
        return {"error": f"no listener within {PROGRAM_SECONDS:g} s"}
    answer: dict[str, Any] = json.loads(line)
    return answer


def listen() -> None:
    """Answer at this host's addresses until the check has ended. The program of `survey`."""
    from dataclasses import asdict

    from hvd_estimators.commands.reachability import listening
    from hvd_estimators.launch.rendezvous.gloo_http import INTERFACE_VARIABLE
    from hvd_estimators.launch.task.addresses import this_host

    given = json.load(sys.stdin)
    variable = os.environ.get(INTERFACE_VARIABLE)
    nics = given["nics"] or ([variable] if variable else [])
    setting = "nics" if given["nics"] else INTERFACE_VARIABLE
    host = this_host("", given["driver"], nics, setting)
    with listening(host.addresses) as places:
        print(json.dumps({"host": asdict(host), "error": host.error, **places}), flush=True)
        deadline = time.monotonic() + _LISTENER_SECONDS
        while os.path.exists(given["folder"]) and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(_LISTENER_LATE)
    shutil.rmtree(given["folder"], ignore_errors=True)


def print_reached() -> None:
    """Print the addresses of each host that answered. A program of `verify`."""
    from hvd_estimators.commands.reachability import reached_addresses

    print(json.dumps(reached_addresses(json.load(sys.stdin), REACH_SECONDS)))


def print_installation() -> None:
    """Print this host's `hvd_estimators.commands.doctor.Facts`. A program of `survey`."""
    from dataclasses import asdict

    from hvd_estimators.commands.doctor import collect

    print(json.dumps(asdict(collect(with_allreduce=False))))


def check_store() -> None:
    """Write and read files of the store; print the problem with each. A program of both tasks.

    Standard input has the ``pickle`` of the store, the ``folder``, the name to ``write``, and the
    names to ``read``; see `problem_of_file`.
    """
    given = json.load(sys.stdin)
    store, folder = pickle.loads(base64.b64decode(given["pickle"])), given["folder"]
    written = [given["write"]] if given["write"] else []
    problems = {
        name: problem
        for name in [*written, *given["read"]]
        if (problem := problem_of_file(store, folder, name, writes=name in written))
    }
    if problems.get("driver") == _UNSEEN:
        # The folder is another one, on this host's own disk.
        with contextlib.suppress(Exception):
            store.delete(folder)
    print(json.dumps({"problems": problems}))


def problem_of_file(store: Any, folder: str, name: str, *, writes: bool) -> str:
    """Write or read a file that contains its name; return the problem, or an empty string."""
    from hvd_estimators.store.redaction import redacted

    path = f"{folder}/{name}"
    try:
        if writes:
            store.write_text(path, name)
        elif not store.exists(path):
            return _UNSEEN
        elif store.read(path) != name.encode():
            return "reads another content"
    except Exception as error:
        return redacted(f"{type(error).__name__}: {error}", store.secrets)
    return ""
