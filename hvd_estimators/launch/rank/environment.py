"""Environment variables of ranks: which of the driver's they see, and how they are put together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from hvd_estimators.launch.rank.quiet import LOG_LEVEL
from hvd_estimators.launch.rendezvous.patience import GLOO_TIMEOUT

__all__ = ["DEFAULTS", "child_environment", "python_path", "shared_environment"]

DEFAULTS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": GLOO_TIMEOUT, **LOG_LEVEL}
"""Variables of ranks that the user, the driver and the executor have not set."""

# Parts of a name; some only at the end of a word, so that TOKENIZERS_PARALLELISM is none of them.
_SECRET = re.compile(
    "SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE|CONNECTION_?STRING"
    "|(?:TOKENS?|KEYS?|KEY_?ID|PASS|PWD)(?:_|$)"
    "|(?:^|_)(?:PAT|SAS|AUTH|COOKIE|DSN|SIGNATURE)(?:_|$)"
)
# A user and a password in a URL, as in those of databases and proxies.
_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")

# What describes the driver's machine, process or session, and would be wrong elsewhere.
_OF_THE_DRIVER = re.compile(
    "|".join(
        [
            # the machine and its user
            "PATH|HOME|USER|LOGNAME|USERNAME|SHELL|SHLVL|PWD|OLDPWD|_|HOST|HOSTNAME|MAIL|EDITOR",
            "TMP|TEMP|TMPDIR|TERM.*|COLUMNS|LINES|PS[1-4]|DISPLAY|WAYLAND_.*|XAUTHORITY|XDG_.*",
            "DBUS_.*|SSH_.*|GPG_.*|SUDO_.*|BASH.*|ZSH.*|LS_COLORS|INVOCATION_ID|JOURNAL_STREAM",
            "LD_LIBRARY_PATH|LD_PRELOAD|DYLD_.*|KRB5CCNAME",
            # Python: the import path travels by itself
            "PYTHONPATH|PYTHONHOME|PYTHONEXECUTABLE|PYTHONUSERBASE|PYTHONSTARTUP|PYTHONPLATLIBDIR",
            "VIRTUAL_ENV.*|CONDA.*|_CE_.*|MPLBACKEND|JPY_.*|PYDEVD_.*|PYTEST_.*|COV_.*",
            # Spark, Java, Hadoop and the cluster's manager
            "SPARK_.*|PYSPARK_.*|_PYSPARK_.*|JAVA_.*|JDK_.*|_JAVA_.*|CLASSPATH|SCALA_.*|HADOOP_.*",
            "YARN_.*|HIVE_.*|HDFS_.*|NM_.*|CONTAINER_ID|LOCAL_DIRS|LOCAL_USER_DIRS|LOG_DIRS",
            "APPLICATION_WEB_PROXY_BASE|KUBERNETES_.*|MESOS_.*|SLURM.*|LSB_.*|PBS_.*|FLUX_.*",
            # GPUs are assigned to each rank
            r"\w*VISIBLE_DEVICES|GPU_DEVICE_ORDINAL",
            # what makes a process one of several: the ranks are told by the launcher
            "HOROVOD_(?:RANK|SIZE|LOCAL_.*|CROSS_.*|GLOO_.*|CONTROLLER|CPU_OPERATIONS|HOSTNAME)",
            "HOROVOD_ELASTIC.*|HOROVOD_SPARK_(?:PYTHONPATH|WORK_DIR)|HVD_ESTIMATORS_.*",
            "RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE",
            "MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|OMPI_.*|PMI_.*|PMIX_.*|MPI_.*|TF_CONFIG",
        ]
    )
)


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that ranks on other machines see.

    All but two kinds. Secrets, which are told by their names (``TOKEN``, ``SECRET``, ``PASSWORD``,
    ``CREDENTIAL``, ``…_KEY`` and the like) or by a password in a URL, because Spark writes what it
    sends to tasks to disks and over networks. And what belongs to the driver's machine or process:
    ``PATH``, ``HOME`` and other places, Python's, Spark's, Java's and Hadoop's own, visible GPUs,
    ranks.

    Parameters
    ----------
    environment : mapping
        The driver's environment.
    """
    return {
        name: value
        for name, value in environment.items()
        if not (
            _SECRET.search(name.upper())
            or _SECRET_VALUE.search(value)
            or _OF_THE_DRIVER.fullmatch(name)
        )
    }


def child_environment(
    base: Mapping[str, str], *overlays: Mapping[str, str | None] | None
) -> dict[str, str]:
    """Lay environments over each other; None deletes a variable."""
    env: dict[str, str | None] = dict(base)
    for overlay in overlays:
        env.update(overlay or {})
    return {name: str(value) for name, value in env.items() if value is not None}


def python_path(*paths: Sequence[str]) -> str:
    """Join import paths for ``PYTHONPATH``, each once."""
    merged = dict.fromkeys(path for group in paths for path in group if path)
    return os.pathsep.join(merged)
