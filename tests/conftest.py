"""What all tests share: one Spark session, and ranks that can unpickle test modules."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

import hvd_estimators  # noqa: F401  test modules then import TensorFlow and torch in any order

# Spark's Python workers run this environment's Python, not the first one in PATH.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ["SPARK_CONF_DIR"] = str(Path(__file__).parent / "helpers" / "spark_conf")
# Everything that these tests start inherits it, also where its parent has gone.
os.environ["TESTS_OF_HVD_ESTIMATORS"] = str(os.getpid())

pytest_plugins = ("servers.fixtures",)

PATIENCE = float(os.environ.get("HVD_TEST_PATIENCE", "1"))
"""Factor of all time limits of tests, for machines that are slow or busy."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run first what forks, and leave out what takes many minutes, unless ``-m`` names it."""
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
    """Let fits of whole suites use the library that HVD_TEST_COLLECTIVES names, for soaks."""
    library = os.environ["HVD_TEST_COLLECTIVES"]
    module = "hvd_estimators.torch.params.choose_collectives"
    monkeypatch.setattr(module, lambda wanted: (library, "HVD_TEST_COLLECTIVES"))


@pytest.fixture(scope="session")
def spark() -> Iterator[object]:
    """A session with three task slots, shared by all tests."""
    from pyspark.sql import SparkSession
    from servers.jars import s3a_jars

    builder = (
        SparkSession.builder.master("local[3]")
        .appName("hvd_estimators tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.memory", "2g")
    )
    if archives := s3a_jars():
        builder = builder.config("spark.driver.extraClassPath", os.pathsep.join(archives))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    # pyspark.ml starts a session of its own where a model is saved and there is none.
    assert session.sparkContext.master == "local[3]", "a test used Spark without this fixture"
    yield session
    session.stop()


@pytest.fixture
def store(tmp_path: Path) -> object:
    """A store in a folder of the test's own."""
    from hvd_estimators import Store

    return Store.create(str(tmp_path / "store"))


@pytest.fixture(scope="module", autouse=True)
def _freeze_imports() -> None:
    """Spare later collections of garbage what is imported by now: half a second for each."""
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
    """Names of horovod.spark that resolve to this package, until the test ends."""
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
