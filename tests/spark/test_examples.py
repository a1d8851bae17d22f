"""Small runs of the example programs: they succeed, and the results that they print are correct.

Each program is called with the tests' session, and with the options of its command line. Full
runs have the marker soak.
"""

from __future__ import annotations

import importlib
import math
import runpy
import subprocess
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


@pytest.mark.soak
def test_rossmann_features_match_pandas(spark: Any, example: Any, tmp_path: Path) -> None:
    data = example("rossmann_data")
    data.make_files(tmp_path, stores=3, seed=2)
    prepared = data.prepare(spark, tmp_path)

    rows = prepared.train.select("Store", "Date", "numbers", "log_sales").toPandas()
    rows["Date"] = pd.to_datetime(rows["Date"])
    tables = {name: pd.read_csv(tmp_path / f"{name}.csv") for name in ("train", "test", "weather")}
    days = pd.concat([tables["train"], tables["test"]]).assign(
        Date=lambda t: pd.to_datetime(t.Date)
    )
    days = days.sort_values(["Store", "Date"])
    promoted = days["Date"].where(days["Promo"] == 1)
    since = (days["Date"] - promoted.groupby(days["Store"]).ffill()).dt.days
    until = (promoted.groupby(days["Store"]).bfill() - days["Date"]).dt.days
    days["AfterPromo"] = since.fillna(60).clip(upper=60)
    days["BeforePromo"] = until.fillna(60).clip(upper=60)
    joined = rows.assign(Store=rows["Store"].astype(int)).merge(
        days[["Store", "Date", "AfterPromo", "BeforePromo", "Sales"]], on=["Store", "Date"]
    )
    assert len(joined) == len(rows)
    assert joined["log_sales"].map(math.exp).round().equals(joined["Sales"].astype(float))
    for name in ("AfterPromo", "BeforePromo"):
        position = data.NUMBERS.index(name)
        scaled = joined["numbers"].map(lambda row, at=position: row[at])
        # Standardized, so only up to a factor and an offset.
        assert scaled.corr(joined[name]) == pytest.approx(1)


@pytest.mark.soak
def test_rossmann_by_run(
    spark: Any, example: Any, options: Any, tmp_path: Path, capsys: Any
) -> None:
    program = example("rossmann_run")
    history = program.run(spark, options("rossmann_run", "--stores", "4", "--epochs", "2"))
    assert len(history["val_rmspe"]) == 2
    assert history["val_rmspe"][1] < history["val_rmspe"][0]
    assert len(pd.read_csv(tmp_path / "submission.csv")) == 4 * 48
    out = capsys.readouterr().out
    # The ranks average over validation without the last odd rows; Spark averages over all rows.
    found = float(out.split("network")[1].split()[0])
    assert found == pytest.approx(min(history["val_rmspe"]), rel=0.05)


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


@pytest.mark.soak
def test_the_timeline_records_every_allreduce(example: Any, options: Any) -> None:
    accuracy, spent = example("runner_timeline").run(options("runner_timeline", "--epochs", "2"))
    assert accuracy > 0.6
    steps = 2 * (1500 // 64)
    # Four parameters per step, and the loss of each epoch.
    assert spent["ALLREDUCE"][0] == 4 * steps + 2


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gpus", ["task", "stage"])
def test_rossmann_trains_on_gpus_that_spark_assigns(tmp_path: Path, gpus: str) -> None:
    script = tmp_path / "gpus.sh"  # gives each of two executors on this machine a different GPU
    script.write_text(
        '#!/bin/sh\nif mkdir "$0.first" 2> /dev/null; then gpu=4; else gpu=7; fi\n'
        'echo "{\\"name\\": \\"gpu\\", \\"addresses\\": [\\"$gpu\\"]}"\n'
    )
    script.chmod(0o755)
    out = subprocess.run(
        [
            *(sys.executable, str(FOLDER / "rossmann_run.py"), "--stores", "4", "--epochs", "2"),
            *("--master", "local-cluster[2,1,1024]", "--gpus", gpus),
            *("--gpu-discovery-script", str(script), "--output", str(tmp_path / "output")),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert sorted(line.split("GPU ")[1] for line in out.splitlines() if "rank " in line) == [
        "4",
        "7",
    ]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_at_full_size(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--output", str(tmp_path)]
    if name == "flight_delays":
        command += ["--framework", "torch", "keras", "lightning"]
    subprocess.run(command, check=True)
