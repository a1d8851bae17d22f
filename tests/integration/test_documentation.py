"""Python blocks of README and documentation, run unchanged, each page from top to bottom.

A literal block after a Python block must match the output of that block.

A page may use the names in `GIVEN` without defining them. Its paths below ``/shared`` and
``/tmp`` are moved to a folder of the test.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documented
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.once, pytest.mark.integration]

PAGES = documented.pages()

FIRST = ("README", "quickstart")
"""Pages that newcomers read first. Others run in soak runs, and are type-checked in each run."""


def _df(spark: Any, folder: Path) -> Any:
    from pyspark.ml.linalg import Vectors

    rows = [
        (i, Vectors.dense([float(i % 7), float(i % 5), 1.0]), float(i % 7 > 3), float(i % 3))
        for i in range(96)
    ]
    return spark.createDataFrame(rows, ["id", "features", "label", "weight"]).coalesce(2)


def _store(spark: Any, folder: Path) -> Any:
    from hvd_estimators import Store

    return Store.create(str(folder / "given"))


def _torch_estimator(spark: Any, folder: Path) -> Any:
    import torch

    from hvd_estimators.torch import TorchEstimator

    net = torch.nn.Linear(3, 2)
    return TorchEstimator(
        num_proc=2,
        store=_store(spark, folder),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=torch.nn.CrossEntropyLoss(),
        column_dtypes={"label": "int64"},
        feature_cols=["features"],
        label_cols=["label"],
        validation=0.25,
        random_seed=1,
        verbose=0,
    )


def _net(spark: Any, folder: Path) -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def _keras_model(spark: Any, folder: Path) -> Any:
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


GIVEN: dict[str, Callable[[Any, Path], Any]] = {
    "spark": lambda spark, folder: spark,
    "df": _df,
    "train_df": _df,
    "test_df": _df,
    "store": _store,
    "estimator": _torch_estimator,
    "net": _net,
    "keras_model": _keras_model,
    "model": lambda spark, folder: _torch_estimator(spark, folder).fit(_df(spark, folder)),
}

ASSUMED = {"assembler", "indexer", "loader", "loss", "optimizer"}
"""Names that blocks which are not run may take for given, too."""


@pytest.fixture
def in_temp_folder(tmp_path: Path) -> Iterator[Path]:
    """Change to a temporary working folder."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("begins\nEpoch 2/2: 39 rows/s, loss=0.08\n   a  0.0181\n1", True),
        ("Epoch 1/2: 39 rows/s, loss=0.08\n   a  0.0181\n1", False),
        ("Epoch 2/2: 39 rows/s, loss=0.18\n   a  0.0181\n1", False),
        ("Epoch 2/2: 39 rows/s, loss=0.08\n   a  0.0281\n1", False),
        ("Epoch 2/2: 39 rows/s, val_loss=0.08\n   a  0.0181\n1", False),
        ("", False),
    ],
)
def test_output_that_differs_from_the_page_is_found(printed: str, expected: bool) -> None:
    shown = "Epoch 2/2: 2,109 rows/s, loss=0.0726\na 0.01...\n..."
    assert documented.prints(shown, printed) is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=() if p.stem in FIRST else pytest.mark.soak) for p in PAGES],
)
def test_blocks_of_a_page_run(page: Path, spark: Any, in_temp_folder: Path) -> None:
    pytest.importorskip("petastorm", reason="they run in the default environment alone")
    blocks = documented.blocks_of(page)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    wanted = documented.names_wanted(blocks)
    unknown = wanted - GIVEN.keys() - ASSUMED
    assert not unknown, f"{page.name}: what are {sorted(unknown)}?"
    for name in sorted(wanted & documented.names_wanted([b for b in blocks if b.runs])):
        namespace[name] = GIVEN[name](spark, in_temp_folder)
    for block in blocks:
        documented.check_imports(block, namespace)
        documented.check_keywords(block, namespace)
        if block.runs:
            text = re.sub("/(?:shared|tmp)/", f"{in_temp_folder}/", ast.unparse(block.tree))
            tree = ast.parse(text)
            for old, new in zip(ast.walk(tree), ast.walk(block.tree), strict=True):
                ast.copy_location(old, new)
            # One stream for both, which keeps the lines in order.
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                exec(compile(ast.fix_missing_locations(tree), str(page), "exec"), namespace)
            printed = stream.getvalue()
            assert documented.prints(block.shown, printed), f"{block.shown}\n\nis not\n\n{printed}"
