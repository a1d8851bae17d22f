"""SparkBackend: number of ranks, and the environment and output of ranks."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_estimators import get_dataset_properties, prepare_data
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.launch.service.events import Event, RankOutput
from hvd_estimators.launch.spark_backend import SparkBackend

pytestmark = pytest.mark.spark


def test_all_slots_are_used_unless_num_proc_is_given(spark: Any) -> None:
    for num_proc, expected in ((None, 3), (0, 3), (2, 2)):
        backend = SparkBackend(num_proc)
        assert backend.num_processes() == expected
        backend.check()
    with pytest.raises(ParamError, match="num_proc: expected 0 or more, found -1"):
        SparkBackend(-1)


def test_ranks_see_the_drivers_settings_and_what_env_adds(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set the variables while the executor runs already, or as if it had inherited them."""
    names = ("WANDB_API_KEY", "PIP_INDEX_URL", "HOROVOD_RANK", "OF_CALL_TOKEN", "OF_BACKEND")
    for name in names[:3]:
        monkeypatch.setenv(name, "driver")
    monkeypatch.setitem(spark.sparkContext.environment, "PIP_INDEX_URL", "inherited")

    def seen() -> list[str | None]:
        return [os.environ.get(name) for name in names]

    (found,) = SparkBackend(1).run(seen, env={"OF_CALL_TOKEN": "call"})
    assert found == ["driver", None, "0", "call", None]

    env = {"OF_BACKEND": "backend", "WANDB_API_KEY": None}
    (found,) = SparkBackend(1, env=env).run(seen)
    assert found == [None, None, "0", None, "backend"]


def test_modules_planted_in_a_folder_of_the_driver_do_not_run_in_ranks(
    spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plant them on the worker, in a folder that holds the script on the driver."""
    folder, mark = tmp_path / "scripts", tmp_path / "ran"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (folder / "module_of_mine.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])

    def is_found() -> bool:
        return importlib.util.find_spec("module_of_mine") is not None

    for warm_start in (True, False):
        assert SparkBackend(1, warm_start=warm_start).run(is_found) == [False]
        assert not mark.exists()
    # The same folder, if only this user can write to it.
    folder.chmod(0o755)
    assert SparkBackend(1, warm_start=False).run(is_found) == [True]


def test_output_of_ranks_is_printed_or_goes_to_a_handler(
    spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        print("hello", os.environ["HOROVOD_RANK"])

    SparkBackend(2, verbose=2).run(work)
    shown = capsys.readouterr().err
    assert [shown.count(f"[{rank}] hello {rank}\n") for rank in (0, 1)] == [1, 1]

    heard: list[Event] = []
    SparkBackend(2, verbose=2).run(work, on_event=heard.append)
    assert sorted(heard, key=lambda event: event.rank) == [
        RankOutput(0, "hello 0\n"),
        RankOutput(1, "hello 1\n"),
    ]
    SparkBackend(1).run(work)
    assert "hello" not in capsys.readouterr().err


def test_dataset_properties_match_horovod_spark(spark: Any, store: Any) -> None:
    from pyspark.ml.linalg import DenseVector, Vectors
    from pyspark.sql import types as T

    rows = [(Vectors.dense(i, 2.0, 3.0), i, i % 4 == 0) for i in range(20)]
    frame = spark.createDataFrame(rows, ["v", "y", "held_out"])
    with prepare_data(2, store, frame, ["y"], ["v"], validation="held_out") as dataset_idx:
        train_rows, val_rows, metadata, avg_row_size = get_dataset_properties(dataset_idx)
        assert get_dataset_properties(dataset_idx, store)[0] == train_rows
    assert (train_rows, val_rows) == (15, 5)
    assert list(metadata) == ["v", "y"]
    assert metadata["v"]["spark_data_type"] is DenseVector
    assert (metadata["v"]["shape"], metadata["v"]["max_size"]) == ([3], 3)
    assert metadata["y"]["spark_data_type"] is T.LongType
    assert (metadata["y"]["shape"], metadata["y"]["dtype"]) == ([], "int64")
    assert avg_row_size > 4
    with pytest.raises(StoreError, match="has not prepared a dataset 'zzz'"):
        get_dataset_properties("zzz")
