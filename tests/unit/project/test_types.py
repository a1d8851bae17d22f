"""Type checkers know params, setters, getters and the models that `fit` returns."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import documented
import pytest

ROOT = Path(__file__).parents[3]

GIVEN = {
    "spark": "SparkSession",
    "df": "DataFrame",
    "train_df": "DataFrame",
    "test_df": "DataFrame",
    "store": "Store",
    "estimator": "TorchEstimator",
    "net": "torch.nn.Module",
    "model": "TorchModel",
}
"""Types of names that pages use without defining them; other names have any type."""

IMPORTS = (
    "import torch; from typing import Any; from pyspark.sql import DataFrame, SparkSession; "
    "from hvd_estimators import Store; from hvd_estimators.torch import TorchEstimator, TorchModel"
)

PYSPARK_LACKS = "has incompatible type \"Literal['logLoss']\""
"""Message about a valid value that PySpark's stubs do not list."""

PROGRAM = """\
import torch
from pyspark.ml import Pipeline
from pyspark.ml.tuning import ParamGridBuilder
from pyspark.sql import DataFrame

from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator, TorchModel


def train(df: DataFrame) -> None:
    net = torch.nn.Linear(3, 1)
    estimator = TorchEstimator(
        store="/shared/experiments",
        model=net,
        optimizer=torch.optim.Adam(net.parameters()),
        loss=[torch.nn.functional.mse_loss],
        feature_cols=["features"],
        label_cols="label",
        column_dtypes={"label": torch.float32},
        val_batch_size=None,
    )
    TorchEstimator(
        model=lambda hidden: torch.nn.Linear(3, hidden),
        model_args={"hidden": 1},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    grid = ParamGridBuilder().addGrid(estimator.batch_size, [16, 32]).build()
    Pipeline(stages=[estimator]).fit(df)
    reveal_type(estimator.fit(df))  # TorchModel
    reveal_type(estimator.fit(df, {estimator.epochs: 2}))  # TorchModel
    reveal_type(estimator.fit(df, grid))  # list[TorchModel]
    reveal_type([m for _, m in estimator.fitMultiple(df, grid)])  # list[TorchModel]
    reveal_type(estimator.fit_on_parquet("/shared/rows"))  # TorchModel
    reveal_type(estimator.setBatchSize(64).setParams(epochs=3))  # TorchEstimator
    reveal_type(estimator.copy())  # TorchEstimator
    reveal_type(estimator.getBatchSize())  # Any
    model = TorchModel.load("/shared/models/one")
    reveal_type(model)  # TorchModel
    reveal_type(model.getModel())  # Module
    reveal_type(model.setOutputCols(["mean"]).getOutputCols())  # list[str]
    reveal_type(KerasEstimator(class_weight={0: 1, 1: 2.5}).fit(df))  # KerasModel
    reveal_type(KerasEstimator().fit(df).getHistory())  # dict[str, list[Any]]
    reveal_type(LightningEstimator(model=net, logger=False).fit(df))  # LightningModel
    reveal_type(LightningEstimator().setLoss(None).setLogger(False))  # LightningEstimator
    reveal_type(LightningEstimator().fit(df, grid))  # list[LightningModel]
    reveal_type(Doubled().setEpochs(2).fit(df))  # TorchModel
    reveal_type(Doubled().getBatchSize())  # int


class Doubled(TorchEstimator):
    def getBatchSize(self) -> int:
        return 2 * int(super().getBatchSize())


TorchEstimator(batchsize=64)  # error: did you mean "batch_size"
TorchEstimator(batch_size="64")  # error: expected "int | None"
TorchEstimator(precision="bf61")  # error: expected "Literal['32', 'bf16', 'fp16'] | None"
TorchEstimator(model="net")  # error: expected Module | Callable[..., Module] | None
TorchEstimator().setParams(batch_size="64")  # error: expected "int | None"
TorchEstimator().setBatchsize(64)  # error: has no attribute "setBatchsize"
TorchEstimator().setParams(epoch=2)  # error: did you mean "epochs"
KerasEstimator(precision="bf16")  # error: Unexpected keyword argument "precision"
LightningEstimator(log_every_n_steps=[1])  # error: expected "int | None"
TorchModel(outputcols=["mean"])  # error: did you mean "outputCols"
"""
"""A user's program, with the types that mypy reveals and the errors that it reports."""


@pytest.mark.slow
def test_signatures_are_those_of_the_declarations() -> None:
    pytest.importorskip("keras")
    import signature_stubs

    for path, text in signature_stubs.stubs().items():
        written = path.read_text(encoding="utf-8") if path.is_file() else ""
        assert written == text, f"{path} is outdated. Run python {signature_stubs.__file__}."


@pytest.mark.slow
def test_mypy_checks_users_programs_and_those_of_the_documentation(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "users_program.py").write_text(PROGRAM)
    for page in documented.pages():
        (tmp_path / f"page_{page.stem}.py").write_text(_program(page))
    # The settings and the cache are those of ``make lint``, so only the programs are new.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, tmp_path.iterdir())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    found: dict[int, str] = {}
    others = []
    for line in done.stdout.splitlines():
        place = re.match(r".*users_program\.py:(\d+): (error|note): (.*)", line)
        if place is None:
            others.append(line)
        elif "Revealed type" in line or place[2] == "error":
            found[int(place[1])] = re.sub(r"\b(?:\w+\.)+(?=\w)", "", place[3])
    assert [line for line in others if PYSPARK_LACKS not in line] == []
    expected = {
        number: comment.removeprefix("error: ")
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if (comment := line.partition("  # ")[2])
    }
    assert found.keys() == expected.keys(), done.stdout
    for number, comment in expected.items():
        is_type = "reveal_type" in PROGRAM.splitlines()[number - 1]
        assert (f'is "{comment}"' if is_type else comment) in found[number]


def _program(page: Path) -> str:
    """Return the blocks of a page as a module with the same line numbers."""
    blocks = documented.blocks_of(page)
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    given = [f"{name}: {GIVEN.get(name, 'Any')}" for name in documented.names_wanted(blocks)]
    lines[0] = "; ".join([IMPORTS, *given])
    # The programs have no annotations, and each may use the names of an earlier one.
    lines[1] = (
        "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-any-generics, "
        'allow-redefinition, disable-error-code="no-redef"'
    )
    for block in blocks:
        code = block.text.splitlines()
        lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines)


def test_signatures_and_help_show_types_and_defaults() -> None:
    pytest.importorskip("torch")
    from hvd_estimators.torch import TorchEstimator, TorchModel

    signature = str(inspect.signature(TorchEstimator))
    assert ", batch_size: int | None = 32, " in signature
    assert ", inference_precision: Literal['float32', 'bfloat16', 'float16'] | None = " in signature
    assert "model: torch.nn.Module | Callable[..., torch.nn.Module] | None = None" in signature
    assert "\nbatch_size : int, default 32\n    Rows per batch and rank.\n" in (
        inspect.getdoc(TorchEstimator) or ""
    )
    getter = inspect.signature(TorchEstimator.getBatchSize)  # type: ignore[attr-defined]
    assert str(getter) == "(self) -> int"
    getter = inspect.signature(TorchModel.getOptimizer)  # type: ignore[attr-defined]
    assert str(getter) == "(self) -> torch.optim.Optimizer | None"
