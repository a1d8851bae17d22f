"""Selection of the driver's environment variables for the ranks."""

import dataclasses

import pytest

from hvd_estimators.launch.rank.environment import shared_environment
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
        b"", 1, b"value-3", True, {"A": "value-1"}, {"B": "value-2"}, {"C": "value-4"}, (), None, 1
    )

    assert "value" not in repr(job)
    assert dataclasses.asdict(job)["driver_env"] == {"A": "value-1"}
