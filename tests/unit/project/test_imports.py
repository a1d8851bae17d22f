"""Modules loaded by importing parts of the package in a fresh process."""

import subprocess
import sys

import pytest

FRAMEWORKS = {"torch", "tensorflow", "keras", "lightning", "pytorch_lightning", "horovod"}
SPARK = {"pyspark", "py4j"}
DATA = {"pyarrow", "petastorm", "pandas", "numpy"}


def imported(*statements):
    """Return the top-level packages that are loaded after some statements."""
    script = "\n".join(
        [*statements, "import sys", "print(*{name.partition('.')[0] for name in sys.modules})"]
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("hvd_estimators", FRAMEWORKS | SPARK | DATA | {"fsspec"}),
        ("hvd_estimators.torch", FRAMEWORKS | SPARK | DATA | {"fsspec"}),
        ("hvd_estimators.keras", FRAMEWORKS | SPARK | DATA | {"fsspec"}),
        ("hvd_estimators.lightning", FRAMEWORKS | SPARK | DATA | {"fsspec"}),
        ("hvd_estimators.launch.rank.worker", FRAMEWORKS | SPARK | DATA),
        ("hvd_estimators.launch.local_backend", FRAMEWORKS - {"horovod"} | SPARK | DATA),
        ("hvd_estimators.loading.readers", FRAMEWORKS | SPARK | {"petastorm", "pandas"}),
        ("hvd_estimators.loading.petastorm", FRAMEWORKS | SPARK),
        ("hvd_estimators.training.progress", FRAMEWORKS | SPARK),
        ("hvd_estimators.training.horovod_session", FRAMEWORKS | SPARK),
        ("hvd_estimators.fitting.tensorboard", FRAMEWORKS),
        ("hvd_estimators.training.row_weights", FRAMEWORKS | SPARK),
        ("hvd_estimators.torch.trainer", FRAMEWORKS - {"torch", "horovod"} | SPARK),
        ("hvd_estimators.lightning.trainer", {"keras", "tensorflow"} | SPARK),
        ("hvd_estimators.keras.trainer", {"torch", "lightning", "pytorch_lightning"} | SPARK),
    ],
)
def test_ranks_import_neither_spark_nor_other_frameworks(module, heavy):
    if module.endswith(".petastorm"):
        reason = "not installable beside today's PyArrow"
        pytest.importorskip("petastorm", reason=reason, exc_type=ImportError)
    assert not imported(f"import {module}") & heavy


def test_public_names_are_loaded_lazily_without_a_framework():
    assert not imported("import hvd_estimators", "hvd_estimators.Store") & (FRAMEWORKS | SPARK)

    driver = imported("from hvd_estimators import Store, prepare_data")
    assert not driver & (FRAMEWORKS | {"petastorm"})
    assert "pyspark" in driver


def test_missing_names_raise_attribute_errors():
    import hvd_estimators
    import hvd_estimators.launch
    import hvd_estimators.torch

    for package in (hvd_estimators, hvd_estimators.launch, hvd_estimators.torch):
        assert set(package.__all__) <= set(dir(package))
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = package.Nothing


@pytest.mark.parametrize(
    ("package", "name", "remedy"),
    [
        ("keras", "keras import KerasEstimator", 'hvd_estimators>[keras]"'),
        ("torch", "torch import TorchEstimator", 'hvd_estimators>[torch]"'),
    ],
)
def test_the_error_without_a_framework_names_the_install_command(package, name, remedy):
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from hvd_estimators.exceptions import DependencyError\n"
        "try:\n"
        f"    from hvd_estimators.{name}\n"
        "except DependencyError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert f"needs {package}" in done.stdout, done.stderr
    assert remedy in done.stdout
