"""Small runs of the example programs: they succeed, and the results that they print are correct.

Each program is called with the tests' session, and with the options of its command line. Full
runs have the marker soak.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pandas as pd
import pytest
from pyspark import cloudpickle as pyspark_cloudpickle

from hvd_estimators import Store, list_prepared_data

pytestmark = [pytest.mark.spark, pytest.mark.once, pytest.mark.slow]

FOLDER = Path(__file__).parents[2] / "examples"
PICKLERS = (cloudpickle, pyspark_cloudpickle)  # for ranks, and for Spark's tasks
HELPERS = {
    "common",
    "rossmann_data",
    "flight_data",
    "flight_keras",
    "flight_lightning",
    "flight_networks",
    "flight_torch",
}
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in HELPERS)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Import a program or a helper of programs; Spark's tasks get its functions by value."""
    taken = []

    def load(name: str) -> Any:
        module = importlib.import_module(name)
        if module not in taken:
            taken.append(module)
            for library in PICKLERS:
                library.register_pickle_by_value(module)
        return module

    sys.path.insert(0, str(FOLDER))
    for helper in sorted(HELPERS):
        load(helper)
    yield load
    sys.path.remove(str(FOLDER))
    for module in taken:
        for library in PICKLERS:
            library.unregister_pickle_by_value(module)


@pytest.fixture
def options(example: Any, tmp_path: Path) -> Any:
    """Parse a program's command line; the results go into the test's folder."""

    def parse(name: str, *argv: str) -> Any:
        module = example(name)
        given = [*argv, "--output", str(tmp_path)]
        if hasattr(module, "parse_args"):
            return module.parse_args(given)
        return example("common").make_parser(module.__doc__, name).parse_args(given)

    return parse


def test_every_program_has_help_and_a_line_in_the_readme(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    readme = (FOLDER / "README.rst").read_text()
    for name in PROGRAMS:
        assert f"``{name}.py``" in readme
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        out = capsys.readouterr().out
        assert out.startswith(f"usage: {name}.py")
        assert "--output OUTPUT" in out


@pytest.mark.soak
def test_rossmann(spark: Any, example: Any, options: Any, tmp_path: Path, capfd: Any) -> None:
    rossmann = example("rossmann")
    args = options("rossmann", "--stores", "4", "--epochs", "2")
    rossmann.run(spark, args)

    submission = pd.read_csv(tmp_path / "submission.csv")
    test = pd.read_csv(tmp_path / "data" / "test.csv")
    assert list(submission.columns) == ["Id", "Sales"]
    assert list(submission["Id"]) == list(test["Id"])
    assert list(submission["Sales"] > 0) == list(test["Open"] == 1)
    captured = capfd.readouterr()
    # Keras would warn about each validation pass, which would puzzle users.
    assert "ran out of data" not in captured.err

    # The saved model's error on the rows equals the best epoch's error.
    found = float(captured.out.split("network")[1].split()[0])
    best = float(captured.out.split("epochs was ")[1].split("with ")[1].split(".\n")[0])
    assert found == pytest.approx(best, abs=2e-4)

    train = spark.read.parquet(str(tmp_path / "train.parquet")).toPandas()
    sold = pd.read_csv(tmp_path / "data" / "train.csv", dtype={"StateHoliday": str})
    assert len(train) == (sold["Sales"] > 0).sum()
    first, last = (
        pd.to_datetime(day) - pd.Timedelta(days=365) for day in ("2015-08-01", "2015-09-17")
    )
    validated = pd.to_datetime(train.loc[train["is_validation"], "Date"])
    assert (validated.min(), validated.max()) == (first, last)


def test_gpu_settings_apply_to_all_tasks_or_to_training_stages(options: Any, example: Any) -> None:
    program = example("rossmann_run")
    cluster = ("--master", "spark://there:7077")
    assert program.gpu_settings(options("rossmann_run", *cluster)) == {}
    stage = program.gpu_settings(options("rossmann_run", "--gpus", "stage", *cluster))
    task = program.gpu_settings(options("rossmann_run", "--gpus", "task", *cluster))
    assert stage["spark.executor.resource.gpu.amount"] == "1"
    assert Path(stage["spark.executor.resource.gpu.discoveryScript"]).is_file()
    assert task == {**stage, "spark.task.resource.gpu.amount": "1"}


@pytest.mark.parametrize(
    "name",
    [
        "digits_torch",
        *(
            pytest.param(f"digits_{name}", marks=pytest.mark.soak)
            for name in ("keras", "lightning")
        ),
    ],
)
def test_digits(spark: Any, example: Any, options: Any, name: str) -> None:
    args = options(name, "--epochs", "3", "--batch-size", "16", "--learning-rate", "0.003")
    assert example(name).run(spark, args) > 0.85


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_flights_in_all_frameworks(spark: Any, example: Any, options: Any, tmp_path: Path) -> None:
    frameworks = ["torch", "keras", "lightning"]
    args = options(
        "flight_delays",
        *("--framework", *frameworks, "--days", "2", "--epochs", "1", "--batch-size", "64"),
        *("--learning-rate", "0.002"),
    )
    arrow = "spark.sql.execution.arrow.pyspark.enabled"  # like the program
    before = spark.conf.get(arrow)
    spark.conf.set(arrow, "true")
    try:
        scores = example("flight_delays").run(spark, args)
    finally:
        spark.conf.set(arrow, before)
    for framework in frameworks:
        assert scores[f"network ({framework})"] < 0.7 * scores["mean of the training months"]
    assert (tmp_path / "learning_curve.png").stat().st_size > 10_000


@pytest.mark.soak
def test_cross_validation(spark: Any, example: Any, options: Any) -> None:
    args = options("cross_validation", "--folds", "2", "--epochs", "8")
    scores = example("cross_validation").run(spark, args)
    assert scores["best network"] > 0.9


@pytest.mark.soak
def test_optuna_search(spark: Any, example: Any, options: Any, tmp_path: Path) -> None:
    example("cross_validation")  # has the network
    trials = ("--trials", "3", "--epochs", "4", "--learning-rate", "0.01", "--num-proc", "1")
    study, score = example("optuna_search").run(spark, options("optuna_search", *trials))
    assert score > 0.9

    # Each trial is one run of the store, resumed until the study prunes it.
    store = Store.create(str(tmp_path / "store"))
    assert len(study.trials) == len(store.list_runs()) == 3
    for trial in study.trials:
        history = store.load_history(f"{study.study_name}-{trial.number}")
        is_validated = (history["stage"] == "validation") & (history["name"] == "loss")
        losses = history[is_validated].sort_values("epoch")["value"].tolist()
        reported = trial.intermediate_values
        assert list(reported) == [1, 2, 4][: len(reported)]
        assert [losses[epochs - 1] for epochs in reported] == list(reported.values())
        assert len(losses) == max(reported)
        pruned = trial.state.name == "PRUNED"
        assert pruned or trial.value == losses[3]
        # Successive halving: after one epoch, it prunes a trial that is worse than the median.
        earlier = [t.intermediate_values[1] for t in study.trials[: trial.number + 1]]
        is_better = reported[1] <= sorted(earlier)[max(len(earlier) // 2 - 1, 0)]
        assert is_better == (len(reported) > 1)
    assert not list_prepared_data(store)


@pytest.mark.soak
def test_four_ways_of_predicting_agree(spark: Any, example: Any, options: Any, capsys: Any) -> None:
    example("streaming").run(spark, options("streaming", "--epochs", "1"))
    out = capsys.readouterr().out
    assert out.count("1797 rows, the same scores") == 4
    assert "DIFFERENT" not in out


def test_files_written_by_other_tools(example: Any, options: Any) -> None:
    program = example("foreign_parquet")
    errors = {}
    for writer in program.WRITERS:
        args = options(
            "foreign_parquet",
            *("--writer", writer, "--rows", "4000", "--epochs", "2", "--batch-size", "32"),
        )
        errors[writer] = program.run(args)
    for found in errors.values():
        assert found["network"] < 0.6 * found["mean of the other months"]


@pytest.mark.soak
def test_text_transformer(spark: Any, example: Any, options: Any) -> None:
    args = options(
        "text_transformer", "--texts", "120", "--epochs", "2", "--learning-rate", "0.003"
    )
    scores = example("text_transformer").run(spark, args)
    assert scores["transformer"] > 1.5 / 5


@pytest.mark.parametrize(
    ("task", "epochs", "least"),
    [
        ("classification", 4, 0.7),
        ("tokens", 2, 0.95),
        pytest.param("generation", 10, 0.6, marks=pytest.mark.soak),
    ],
)
def test_hugging_face(
    spark: Any, example: Any, options: Any, capsys: Any, task: str, epochs: int, least: float
) -> None:
    args = options("hugging_face", "--task", task, "--epochs", str(epochs))
    assert example("hugging_face").run(spark, args) > least
    if task == "classification":
        shown = capsys.readouterr().out
        assert "a moving film: good\nthe plot is dull and the music is bad: bad" in shown


@pytest.mark.soak
def test_large_images(spark: Any, example: Any, options: Any) -> None:
    args = options("large_images", "--images", "64", "--epochs", "2", "--learning-rate", "0.003")
    assert example("large_images").run(spark, args) >= 0.5
