"""Shared fixtures: one Spark session, and test modules that ranks can unpickle."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import hypothesis
import pytest

import hvd_estimators  # noqa: F401  lets test modules import TensorFlow and torch in any order

# Spark's Python workers run this environment's Python, not the first one in PATH.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ["SPARK_CONF_DIR"] = str(Path(__file__).parent / "helpers" / "spark_conf")
# All processes that these tests start inherit it, even orphans; ranks do by the prefix TORCH_.
os.environ["TORCH_TESTS_OF_HVD_ESTIMATORS"] = str(os.getpid())

# A busy machine may take any time for an example.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

pytest_plugins = ("servers.fixtures",)

PATIENCE = float(os.environ.get("HVD_TEST_PATIENCE", "1"))
"""Factor of all time limits of tests, for machines that are slow or busy."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests marked ``forks`` first, and deselect ``soak`` tests unless ``-m`` names them."""
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)
    for item in items if PATIENCE != 1 else ():
        limit = item.get_closest_marker("timeout")
        seconds = limit.args[0] if limit else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(PATIENCE * seconds), append=False)
    if "soak" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=os.environ.get("HVD_TEST_COLLECTIVES") is not None)
def _collectives_of_all_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all fits use the library that HVD_TEST_COLLECTIVES names, for soak runs."""
    library = os.environ["HVD_TEST_COLLECTIVES"]
    function = "hvd_estimators.params.estimator.choose_collectives"
    monkeypatch.setattr(function, lambda *_: (library, "HVD_TEST_COLLECTIVES"))


@pytest.fixture(scope="session")
def spark() -> Iterator[object]:
    """Start a session with three task slots, shared by all tests."""
    from pyspark.sql import SparkSession
    from servers.jars import s3a_jars

    builder = (
        SparkSession.builder.master("local[3]")
        .appName("hvd_estimators tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.memory", "2g")
        .config("spark.python.daemon.module", "python_daemon")
        .config("spark.executorEnv.PYTHONPATH", str(Path(__file__).parent / "helpers"))
    )
    if archives := s3a_jars():
        builder = builder.config("spark.driver.extraClassPath", os.pathsep.join(archives))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    # pyspark.ml starts a session if a model is saved without one.
    assert session.sparkContext.master == "local[3]", "a test used Spark without this fixture"
    yield session
    session.stop()


@pytest.fixture
def store(tmp_path: Path) -> object:
    """Return a store in the test's folder."""
    from hvd_estimators import Store

    return Store.create(str(tmp_path / "store"))


@pytest.fixture
def cleared_cache() -> Iterator[None]:
    """Forget the data that a test prepares."""
    from hvd_estimators import clear_training_cache

    yield
    clear_training_cache()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Filesystem of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this process may not mount a filesystem: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module", autouse=True)
def _freeze_imports() -> None:
    """Exclude imported objects from later garbage collections, and save half a second in each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _pickle_test_module_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Send the test module's functions and classes by value: ranks cannot import it."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def compat() -> Iterator[None]:
    """Resolve names of horovod.spark to this package, until the test ends."""
    from hvd_estimators._util import unpickle_imports
    from hvd_estimators.compat import finder

    def forget() -> None:
        for name in list(sys.modules):
            is_alias = any(f"{name}.".startswith(f"{alias}.") for alias in finder.ALIASES)
            if is_alias or name in finder.COMPLETED:
                del sys.modules[name]

    def uninstall() -> None:
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, finder._AliasFinder)]
        unpickle_imports._modules.clear()
        forget()

    forget()
    finder.install()
    yield
    uninstall()
