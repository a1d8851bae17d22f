"""Environment variables of the ranks, and the reserved port."""

from __future__ import annotations

import dataclasses
import socket
import struct
import subprocess
import sys
from typing import Any

import pytest

from hvd_estimators.launch.rank import environment
from hvd_estimators.launch.rank.environment import reserved_port, shared_environment
from hvd_estimators.launch.task.job import Job


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "OPENAI_APIKEY",
        "PGPASSWORD",
        "MYSQL_PWD",
        "SSHPASS",
        "GITHUB_PAT",
        "db_password",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_SAS",
        "SENTRY_DSN",
        "PYSPARK_GATEWAY_SECRET",
    ],
)
def test_secrets_stay_on_the_driver(name):
    assert shared_environment({name: "x"}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "PWD",
        "TMPDIR",
        "_",
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LD_LIBRARY_PATH",
        "SPARK_HOME",
        "SPARK_LOCAL_IP",
        "PYSPARK_PYTHON",
        "JAVA_HOME",
        "HADOOP_CONF_DIR",
        "CONTAINER_ID",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "HOROVOD_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_ELASTIC",
        "HVD_ESTIMATORS_SERVICE",
        "SLURM_JOB_ID",
        "MASTER_ADDR",
        "WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TF_CONFIG",
        "MPLBACKEND",
    ],
)
def test_variables_of_the_drivers_machine_or_process_are_not_shared(name):
    assert shared_environment({name: "x"}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "MLFLOW_TRACKING_URI",
        "AWS_PROFILE",
        "TOKENIZERS_PARALLELISM",
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_TIMELINE",
        "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "TF_CPP_MIN_LOG_LEVEL",
        "KERAS_BACKEND",
        "LIBHDFS_OPTS",
        "PYTHONHASHSEED",
        "PYTHONWARNINGS",
        "AUTHOR",
        "http_proxy",
        "MY_PATH",
    ],
)
def test_everything_else_is_shared(name):
    assert shared_environment({name: "x"}) == {name: "x"}


def test_only_urls_with_a_password_are_secrets():
    given = {
        "DATABASE_URL": "postgresql://me:hunter2@db/prod",
        "HTTPS_PROXY": "http://me:pw@proxy:3128",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000/a@b",
    }

    assert list(shared_environment(given)) == ["MLFLOW_TRACKING_URI"]


def test_the_repr_of_a_job_shows_no_variables():
    job = Job(
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
def test_a_second_server_or_one_without_reuseaddr_cannot_listen() -> None:
    with reserved_port() as port:
        with pytest.raises(OSError, match="in use"):
            listening(port, reuse=False)
        with listening(port), pytest.raises(OSError, match="in use"):
            listening(port)


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


def test_without_ipv6_the_port_covers_all_ipv4_addresses(monkeypatch: Any) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with reserved_port() as port:
        listening(port).close()


def test_on_other_systems_it_is_free_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(environment, "PLATFORM", "darwin")
    with reserved_port() as port:
        listening(port, reuse=False).close()
