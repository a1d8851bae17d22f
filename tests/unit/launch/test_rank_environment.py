"""Environment variables of the ranks, and the reserved port."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_estimators.launch import LocalBackend
from hvd_estimators.launch.rank.environment import (
    local_environment,
    reserved_port,
    shared_environment,
)
from hvd_estimators.launch.task.settings import TaskSettings, task_environment

SECRETS = {
    "PIP_INDEX_URL": "https://user:token@index.example/simple",
    "SLACK_WEBHOOK": "https://hooks.example/T0/B0/secret",
    "JDBC_URL": "jdbc:postgresql://db/prod?user=me&password=hunter2",
    "DATA_URL": "https://bucket.example/key?X-Amz-Signature=0a1b",
    "PGPASSWORD": "hunter2",
    "OPENAI_APIKEY": "key",
    "HF_TOKEN": "token",
    "HOROVOD_SECRET_KEY": "key",
    "PYTHON_WORKER_FACTORY_SECRET": "secret",
    "PYSPARK_GATEWAY_SECRET": "secret",
}
SETTINGS = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
    "HOROVOD_CYCLE_TIME": "5",
    "HOROVOD_TIMELINE": "/tmp/timeline.json",
    "HVD_ESTIMATORS_GRACE_SECONDS": "30",
    "HVD_ESTIMATORS_HANG_SECONDS": "3600",
    "HVD_ESTIMATORS_WARM_SECONDS": "600",
    "WANDB_API_KEY": "key",
    "COMET_API_KEY": "key",
    "MLFLOW_TRACKING_URI": "http://mlflow:5000",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "3",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_LAUNCH_BLOCKING": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "KERAS_BACKEND": "tensorflow",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "7",
}
OF_THE_MACHINE = {
    "PATH": os.environ["PATH"],
    "HOME": "/home/me",
    "TZ": "UTC",
    "LD_LIBRARY_PATH": "/opt/lib",
    "CUDA_VISIBLE_DEVICES": "1",
    "JAVA_HOME": "/opt/java",
    "HADOOP_CONF_DIR": "/etc/hadoop",
    "AWS_SECRET_ACCESS_KEY": "key",
    "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
    "https_proxy": "http://proxy:3128",
    "TORCH_HOME": "/models",
    "KERAS_HOME": "/keras",
    "WANDB_DIR": "/wandb",
}
OF_A_JOB = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"), "7"),
    **{"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": "/error"},
    **{"TF_CONFIG": "{}", "HOROVOD_ELASTIC": "1", "HOROVOD_RANK": "7", "HOROVOD_SIZE": "9"},
    **{"OMPI_COMM_WORLD_RANK": "7", "SLURM_PROCID": "7", "HVD_ESTIMATORS_RANKS_KEY": "other"},
}
DRIVER = {**SECRETS, **SETTINGS, **OF_THE_MACHINE, **OF_A_JOB, "OF_MINE": "x", "MPLBACKEND": "x"}


def of_local_ranks() -> dict[str, str]:
    (found,) = LocalBackend(1, warm_start=False).run(lambda: dict(os.environ))
    return found


def of_ranks_of_a_local_master() -> dict[str, str]:
    return task_environment(job_of({}, inherits=True))


def job_of(driver: dict[str, str], inherits: bool, **env: str | None) -> TaskSettings:
    return TaskSettings(False, shared_environment(driver), env, (), None, 1, inherits=inherits)


@pytest.mark.parametrize("environment_of", [of_local_ranks, of_ranks_of_a_local_master])
def test_ranks_on_the_drivers_machine_inherit_what_is_listed(
    monkeypatch: pytest.MonkeyPatch, environment_of: Any
) -> None:
    monkeypatch.setattr("pyspark.SparkFiles.getRootDirectory", lambda: "/files")
    for name, value in DRIVER.items():
        monkeypatch.setenv(name, value)
    found = environment_of()
    assert not {*SECRETS, "OF_MINE", "MPLBACKEND"} & found.keys()
    assert {**SETTINGS, **OF_THE_MACHINE}.items() <= found.items()
    assert not OF_A_JOB.items() & found.items()


def test_ranks_on_a_cluster_have_their_executors_variables_and_the_drivers_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pyspark.SparkFiles.getRootDirectory", lambda: "/files")
    of_executor = {"PATH": "/bin", "OF_THE_ADMINISTRATOR": "x", "OMP_NUM_THREADS": "1"}
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in of_executor.items():
        monkeypatch.setenv(name, value)
    given = {"PGPASSWORD": "given", "TF_CPP_MIN_LOG_LEVEL": None, "OMP_NUM_THREADS": "2"}
    found = task_environment(job_of(DRIVER, False, **given))
    assert found.pop("PYTHONPATH")
    expected = {**SETTINGS, **of_executor, **given}
    del expected["TF_CPP_MIN_LOG_LEVEL"]
    assert {name: found.get(name) for name in expected} == expected
    assert not found.keys() - expected.keys()


def test_the_page_lists_the_variables_that_reach_ranks() -> None:
    page = (Path(__file__).parents[3] / "docs" / "launching.rst").read_text()
    table = page.partition("Variables of the driver that reach ranks")[2].partition("**Keys.**")[0]
    rows = table.partition("Settings, on every master")[2].partition("* - The machine")
    settings, machine = (re.findall(r"``([\w*]+)``", row) for row in rows[::2])
    settings.remove("HOROVOD_GLOO_IFACE")
    machine.remove("LocalBackend")
    assert len(settings) > 30
    assert len(machine) > 30
    for kept, names in ((shared_environment, settings), (local_environment, settings + machine)):
        given = {name.replace("*", "X"): "x" for name in names}
        assert kept(given) == given
    assert shared_environment({name.replace("*", "X"): "x" for name in machine}) == {}


only_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not kept")


def listening(port: int, address: str = "0.0.0.0", reuse: bool = True) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        made.bind((address, port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def restricted_to(port: int) -> socket.socket:
    """Return a socket to which the system may assign only one port."""
    made = socket.socket()
    ip_local_port_range = 51
    made.setsockopt(socket.IPPROTO_IP, ip_local_port_range, struct.pack("I", port << 16 | port))
    return made


def answers(port: int, address: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


@only_linux
@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::", "::1"])
def test_a_server_can_listen_on_it_repeatedly(address: str) -> None:
    with reserved_port() as port:
        assert not answers(port)
        for _ in range(2):
            with listening(port, address):
                assert answers(port, "::1" if address == "::1" else "127.0.0.1")
            # The system still remembers the first server's connection.
            assert not answers(port)
    listening(port).close()


@only_linux
def test_the_system_assigns_it_to_no_other_program() -> None:
    """Neither for listening on port 0 nor for outgoing connections."""
    with reserved_port() as port, listening(0) as server:
        with restricted_to(port) as made, pytest.raises(OSError, match="in use"):
            made.bind(("0.0.0.0", 0))
        with restricted_to(port) as made, pytest.raises(OSError, match="assign"):
            made.connect(("127.0.0.1", server.getsockname()[1]))
    with restricted_to(port) as made:
        made.bind(("0.0.0.0", 0))
        assert made.getsockname()[1] == port


@only_linux
def test_torch_can_listen_on_it_in_another_process() -> None:
    program = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
port = int(sys.argv[1])
for libuv in (True, False):
    server = TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=20), use_libuv=libuv)
    client = TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=20), use_libuv=libuv)
    server.set("key", "value")
    print(client.get("key").decode())
    del client, server
"""
    with reserved_port() as port:
        done = subprocess.run(
            [sys.executable, "-c", program, str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.split() == ["value", "value"], done.stderr


def test_the_repr_of_a_job_shows_no_variables():
    job = TaskSettings(
        one_machine=True,
        driver_env={"A": "value-1"},
        env={"B": "value-2"},
        driver_path=(),
        executable=None,
        verbose=1,
        call=b"value-3",
        secret=b"value-4",
        service="value-5",
    )

    assert "value" not in repr(job)
    assert dataclasses.asdict(job)["driver_env"] == {"A": "value-1"}
