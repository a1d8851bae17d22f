"""Horovod's own examples for Spark, run through compat in separate processes.

``HVD_TEST_HOROVOD_EXAMPLES`` names the folder ``examples/spark`` of a checkout of Horovod 0.28.
The tables below list the changes to each script and their reasons. Scripts also start with
``import hvd_estimators.compat`` if the installed Horovod was built without ``--with-compat``.
Their data are real digits, enlarged to MNIST's size, and tables of made-up stores.
"""

from __future__ import annotations

import bz2
import importlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hvd_estimators.launch.horovod_build import installed_horovod_spark

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(1900)]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Example:
    """Script, the changes that Keras 3 or Lightning 2 require, and its arguments.

    Attributes
    ----------
    path : str
        Below the folder.
    arguments : tuple of str
        Arguments of the command line, except those that name folders.
    changes : tuple of (str, str)
        Pairs of old and new text, replaced everywhere.
    """

    path: str
    arguments: tuple[str, ...]
    changes: tuple[tuple[str, str], ...] = ()


DIGITS = [
    Example("pytorch/pytorch_spark_mnist.py", ("--batch-size=32",)),
    Example("keras/keras_spark_mnist.py", ("--epochs=3",)),
    Example(
        "pytorch/pytorch_lightning_spark_mnist.py",
        ("--batch-size=32", "--enable-profiler"),
        # Lightning 2 does not call on_epoch_end, which the script's callback counts.
        (("assert self.epcoh_end_counter ==", "assert 2 * epochs =="),),
    ),
    Example("pytorch/pytorch_lightning_spark_mnist_legacy.py", ("--batch-size=32",)),
]
ROSSMANN = Example(
    "keras/keras_spark_rossmann_estimator.py",
    ("--epochs=12", "--learning_rate=0.0005"),
    # Optimizers of Keras 3 do not have lr.
    (("Adam(lr=", "Adam(learning_rate="),),
)


def run(example: Example, folder: Path, *arguments: str) -> str:
    """Run an example in a folder and return its output."""
    home = os.environ.get("HVD_TEST_HOROVOD_EXAMPLES")
    if not home:
        pytest.skip("HVD_TEST_HOROVOD_EXAMPLES is not set")
    script = Path(home, example.path).read_text()
    for old, new in example.changes:
        assert old in script, f"{example.path} has no {old!r}"
        script = script.replace(old, new)
    if installed_horovod_spark() != "compat":
        script = f"import hvd_estimators.compat\n{script}"
    (folder / "script.py").write_text(script)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYSPARK_PYTHON": sys.executable,
    }
    given = ["--num-proc=2", f"--work-dir={folder / 'work'}", *example.arguments, *arguments]
    done = subprocess.run(
        [sys.executable, "script.py", *given],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def printed(name: str, output: str) -> float:
    found = re.findall(rf"^{name}: (\S+)$", output, re.MULTILINE)
    assert len(found) == 1, output[-4000:]
    return float(found[0])


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``mnist.bz2``: digits of 8 x 8 in images of 28 x 28, each at four places."""
    from sklearn.datasets import dump_svmlight_file, load_digits

    folder, data = tmp_path_factory.mktemp("digits"), load_digits()
    images = np.pad(np.kron(data.images * 15, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    moved = [np.roll(images, (dx, dy), (1, 2)) for dx in (-1, 1) for dy in (-1, 1)]
    text = io.BytesIO()
    rows = np.concatenate(moved).reshape(-1, 28 * 28)
    dump_svmlight_file(rows, np.tile(data.target, 4), text, zero_based=False)
    (folder / "mnist.bz2").write_bytes(bz2.compress(text.getvalue()))
    return folder


@pytest.mark.parametrize("example", DIGITS, ids=lambda example: Path(example.path).stem)
def test_digits(example: Example, digits: Path, tmp_path: Path) -> None:
    output = run(example, tmp_path, f"--data-dir={digits}")
    # Chance gives 0.1. The scripts neither seed weights nor scale pixels, so some runs start with
    # dead units: observed values range from 0.6 to 0.99.
    assert printed("Test accuracy", output) > 0.5


def test_rossmann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    monkeypatch.syspath_prepend(ROOT / "examples")
    importlib.import_module("rossmann_data").make_files(data, stores=20, seed=0)

    # The script joins by the week's number in the calendar year. The last days of December are in
    # week 1, and so have a trend if the table starts in January, as Kaggle's does. Google's weeks
    # start a day before those of the calendar.
    trend = pd.read_csv(data / "googletrend.csv")
    days = pd.date_range("2013-01-06", "2013-06-23", freq="7D").append(
        pd.DatetimeIndex(["2015-09-20"])
    )
    weeks = [f"{day:%Y-%m-%d} - {day + pd.Timedelta(days=6):%Y-%m-%d}" for day in days]
    earlier = pd.MultiIndex.from_product([trend["file"].unique(), weeks], names=["file", "week"])
    trend = pd.concat([earlier.to_frame(index=False).assign(trend=60), trend])
    trend.to_csv(data / "googletrend.csv", index=False)

    output = run(ROSSMANN, tmp_path, f"--data-dir=file://{data}")

    train = pd.read_csv(data / "train.csv", dtype={"StateHoliday": str})
    sales = train[train["Sales"] > 0]["Sales"]
    # The error of a constant at the mean of the logarithms; the table's noise alone has 0.1.
    constant = np.sqrt(np.mean((1 - np.exp(np.log(sales).mean()) / sales) ** 2))
    assert printed("Best RMSPE", output) < constant / 2
    predicted = pd.read_csv(tmp_path / "submission.csv")
    assert predicted["Id"].tolist() == pd.read_csv(data / "test.csv")["Id"].tolist()
    assert predicted["Sales_pred"].between(sales.min() / 4, sales.max() * 4).all()
