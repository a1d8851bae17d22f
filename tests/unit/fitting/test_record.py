"""The driver's notes of a run during training, and a store's list of runs."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import signal
import threading
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from hvd_estimators._util.process_identity import ProcessIdentity
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import LoggerError, ParamError
from hvd_estimators.fitting.record import RunRecord, recorded_params, start_record
from hvd_estimators.fitting.run import Run
from hvd_estimators.fitting.run_loggers import RunLoggers
from hvd_estimators.launch.service.events import RankEpoch, RankOutput
from hvd_estimators.launch.service.output_sinks import print_event
from hvd_estimators.loading.plan import RowRange, ShardPlan
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.loggers import LoggedRun, Logger
from hvd_estimators.store import FilesystemStore, LocalStore
from hvd_estimators.store.checkpoints import CheckpointInfo, checkpoint_path, write_manifest
from hvd_estimators.store.leases import Lease, LeaseRecord, lease_path, newest_lease
from hvd_estimators.store.paths import Position
from hvd_estimators.store.runs import read_metadata, run_file
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.training.spec import CheckpointOptions, EpochMetrics

COLUMNS = [
    ColumnSpec("größe, x", "vector", "float32", (3,)),
    ColumnSpec("y", "scalar", "int64", ()),
]


def record(store: Any, run_id: str = "mine", before: Any = None, **params: Any) -> RunRecord:
    estimator = TorchEstimator(store=store, model=torch.nn.Linear(3, 1), epochs=4, **params)
    run = Run(store, store.run_paths(run_id))
    if before is not None:
        run.checkpoints, run.metadata = (Position(1),), before
    plan = ShardPlan(((RowRange("a", 0, 0, 4),),) * 3)
    data = DataSpec(
        *(tuple(COLUMNS), "train", None, plan, None, 2, ("größe, x",), ("y",), None),
        *(4, 4, 1, 0, 7, None),
    )
    spec: Any = SimpleNamespace(data=data, checkpoints=CheckpointOptions("torch"))
    loggers = RunLoggers(LoggedRun(run.paths.run_id, "0" * 40, run.epochs_done, {}))
    return RunRecord(run, start_record(estimator, run, spec), loggers)


def epoch(number: int, loss: float, val_loss: float | None = None) -> RankEpoch:
    rows = [("train", "loss", loss)]
    return RankEpoch(0, number, [*rows, ("validation", "loss", val_loss)] if val_loss else rows)


def rows_of(store: Any, run_id: str = "mine") -> list[tuple[Any, ...]]:
    return list(store.load_history(run_id).itertuples(index=False, name=None))


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """Queue the names of files after they are written to local stores."""
    written: queue.Queue[str] = queue.Queue()
    real = LocalStore.write_text

    def write(self: Any, path: str, text: str) -> None:
        real(self, path, text)
        written.put(Path(path).name)

    monkeypatch.setattr(LocalStore, "write_text", write)
    return written


def test_runs_are_noted_during_training_and_at_the_end(
    store: Any, writes: queue.Queue[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Lease(store, store.run_paths("mine")), record(store) as noted:
        handle = noted.handler(print_event)
        assert writes.get(timeout=10) == "metadata.json"
        (info,) = store.list_runs()
        assert (info.run_id, info.state, info.epochs, info.ended) == ("mine", "running", 0, None)
        assert rows_of(store) == []
        handle(epoch(0, 0.5, 0.75))
        assert writes.get(timeout=10) == "history.json"
        assert rows_of(store) == [(0, "train", "loss", 0.5), (0, "validation", "loss", 0.75)]
        handle(RankOutput(1, "hello\n"))
        handle(epoch(1, math.nan))
    assert capsys.readouterr().err == "[1] hello\n"

    # Without results of the ranks, the notes hold the reported epochs.
    (info,) = store.list_runs()
    assert (info.framework, info.state, info.epochs, info.error) == ("torch", "finished", 2, None)
    assert info.ended is not None
    assert info.ended >= info.started
    assert math.isnan(info.metrics["train/loss"])
    frame = store.load_history("mine")
    assert list(frame.columns) == ["epoch", "stage", "name", "value"]
    assert frame["value"].isna().tolist() == [False, False, True]

    notes = read_metadata(store, info.path)
    assert notes is not None
    assert notes["columns"][0] == {
        "name": "größe, x",
        "kind": "vector",
        "dtype": "float32",
        "shape": [3],
    }
    assert notes["row_order"] == {"canonical_shards": 3, "random_seed": 7, "row_bytes": 0}
    assert (notes["num_ranks"], notes["params"]["epochs"]) == (2, 4)
    assert notes["params"]["model"] == "torch.nn.modules.linear.Linear"
    assert notes["versions"]["torch"] == version("torch")
    assert [fit["state"] for fit in notes["fits"]] == ["finished"]
    # Numbers that all JSON readers accept.
    text = Path(info.path, "history.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"found {name}"))


def test_resumed_runs_keep_their_first_notes(store: Any) -> None:
    with record(store, batch_size=8) as noted:
        handle = noted.handler(print_event)
        for number in range(3):
            handle(epoch(number, 1 / (number + 1)))
    first = read_metadata(store, store.run_paths("mine").run_path)
    assert first is not None
    # The newest checkpoint is of epoch 2; the third epoch is trained again.

    def fail(noted: RunRecord) -> None:
        noted.handler(print_event)(epoch(2, 0.25))
        raise RuntimeError("the rank ended")

    with pytest.raises(RuntimeError), record(store, before=first, batch_size=9) as noted:
        fail(noted)
    assert [row[3] for row in rows_of(store)] == [1.0, 0.5, 0.25]
    second = read_metadata(store, store.run_paths("mine").run_path)
    assert second is not None
    assert second["started"] == first["started"]
    assert second["params"] == first["params"]
    assert [fit["state"] for fit in second["fits"]] == ["finished", "failed"]
    assert second["error"] == {"class": "RuntimeError", "message": "the rank ended"}
    (info,) = store.list_runs()
    assert (info.state, info.error) == ("failed", "RuntimeError: the rank ended")
    # A killed driver has not noted an end.
    second["fits"][1]["state"] = "running"
    with record(store, before=second):
        pass
    (info,) = store.list_runs()
    assert (info.state, info.error) == ("finished", None)
    third = read_metadata(store, info.path)
    assert third is not None
    assert [fit["state"] for fit in third["fits"]] == ["finished", "interrupted", "finished"]


def test_notes_hold_no_secrets(tmp_path: Path) -> None:
    mark = "MARKED-abc+/="
    store = LocalStore(str(tmp_path), storage_options={"secret": mark, "nested": [{"key": mark}]})
    params = {"custom_objects": {"api_key": mark, "tokenizer": "bert"}, "long": "x" * 5000}
    with pytest.raises(OSError), record(store):  # noqa: PT011
        raise OSError(f"403 for {mark}")

    many = [f"c{i}" for i in range(300)]
    estimator = TorchEstimator(store=store, callbacks=[params, object()], feature_cols=many)
    noted = recorded_params(estimator)
    assert noted["callbacks"][0]["custom_objects"] == {"api_key": "(hidden)", "tokenizer": "bert"}
    assert len(noted["callbacks"][0]["long"]) < 1100
    assert noted["feature_cols"][-1] == "… (300 in all)"
    assert noted["callbacks"][1] == "builtins.object"
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or mark not in file.read_text()
    assert store.list_runs()[0].error == "OSError: 403 for ***"


def test_a_failing_store_costs_warnings(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, path: str, text: str) -> None:
        raise OSError(28, "no space left")

    with caplog.at_level(logging.WARNING), record(store) as noted:
        monkeypatch.setattr(LocalStore, "write_text", fail)
        noted.handler(print_event)(epoch(0, 0.5))
        noted.complete([EpochMetrics(0, {"loss": 0.5})], None)  # type: ignore[arg-type]
    assert caplog.text.count("metrics could not be written") == 1
    assert caplog.text.count("The record of run 'mine' is incomplete") == 2


def test_a_failed_fit_writes_the_missing_epochs(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    write_text = LocalStore.write_text

    def fail_once(self: Any, path: str, text: str) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(28, "no space left")
        write_text(self, path, text)

    with contextlib.suppress(ZeroDivisionError), record(store) as noted:
        monkeypatch.setattr(LocalStore, "write_text", fail_once)
        noted.handler(print_event)(epoch(0, 0.5))
        assert failed.wait(30)
        raise ZeroDivisionError
    assert [run.epochs for run in store.list_runs()] == [1]


def test_a_run_whose_checkpoints_were_deleted_has_no_epochs(store: Any) -> None:
    with record(store) as noted:
        noted.handler(print_event)(epoch(0, 0.5))
    assert rows_of(store) == [(0, "train", "loss", 0.5)]
    for before, kept in ({}, 1), (None, 0):
        with pytest.raises(ZeroDivisionError), record(store, before=before):
            raise ZeroDivisionError
        assert len(rows_of(store)) == kept
        (run,) = store.list_runs()
        assert run.epochs == kept


def test_runs_are_listed_newest_first_and_damaged_ones_last(store: Any) -> None:
    for number, run_id in enumerate(["b", "a", "c"]):
        with record(store, run_id) as noted:
            noted.handler(print_event)(epoch(number, 0.5))
    folder = Path(store.get_runs_path())
    (folder / "stray file").write_text("")
    (folder / "empty").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "metadata.json").write_text("{")
    (folder / "a" / "history.json").write_text("[")
    listed = [(run.run_id, run.epochs) for run in store.list_runs()]
    assert listed == [("c", 3), ("a", 0), ("b", 1), ("damaged", 0)]
    # A run noted as running without a lease ended unexpectedly.
    notes = json.loads((folder / "b" / "metadata.json").read_text())
    (folder / "b" / "metadata.json").write_text(json.dumps({**notes, "state": "running"}))
    assert [run.state for run in store.list_runs()][2:] == ["interrupted", "damaged"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_whose_run_another_process_trains_records_no_outcome(store: Any, fails: bool) -> None:
    noted = record(store)
    run = noted._run
    error = pytest.raises(OSError, match="slow") if fails else contextlib.nullcontext()
    with run, error, noted:
        generation = newest_lease(store, run.paths.run_path)[0]
        successor = LeaseRecord(ProcessIdentity("elsewhere", 1, "1"), token="successor")
        store.write_new(lease_path(run.paths.run_path, generation + 1), successor.to_json())
        for name in ("metadata", "history"):
            store.write_text(run_file(run.paths.run_path, name), "of the successor")
        if fails:
            raise OSError("slow")
        noted.complete([], SimpleNamespace())
    for name in ("metadata", "history"):
        assert store.read(run_file(run.paths.run_path, name)) == b"of the successor"


@pytest.mark.parametrize("remote", [False, True])
def test_deleting_a_run_deletes_nothing_else(tmp_path: Path, remote: bool) -> None:
    store: Any = FilesystemStore(f"memory://{tmp_path}") if remote else LocalStore(str(tmp_path))
    for run_id in ("run", "run-2"):
        with record(store, run_id):
            store.write_text(f"{store.run_paths(run_id).logs_path}/events", "")
    with pytest.raises(ParamError, match=r"has no run 'run-3'. Did you mean 'run-2'"):
        store.delete_run("run-3")
    with (
        Lease(store, store.run_paths("run")),
        pytest.raises(ParamError, match="'run' is being trained by another fit"),
    ):
        store.delete_run("run")
    store.delete_run("run")
    assert [run.run_id for run in store.list_runs()] == ["run-2"]
    assert not store.exists(store.run_paths("run").run_path)
    with pytest.raises(ParamError, match=r"has no run 'run'"):
        store.load_history("run")
    assert isinstance(store.load_history("run-2"), pd.DataFrame)
    store.delete(store.prefix_path)


def test_checkpoints_provide_epochs_without_a_history(store: Any) -> None:
    run = store.run_paths("mine")
    for epochs, rows in ((2, 0), (3, 0), (3, 16)):
        metrics = {"loss": 1 / epochs, "val_loss": math.inf}
        path = checkpoint_path(run, Position(epochs, rows))
        store.write_text(path, "")
        write_manifest(store, CheckpointInfo(path, 0, "", epochs, rows, "torch", metrics))
    assert rows_of(store) == [
        (1, "train", "loss", 1 / 2),
        (1, "validation", "loss", math.inf),
        (2, "train", "loss", 1 / 3),
        (2, "validation", "loss", math.inf),
    ]


def test_loggers_get_each_epoch_at_the_end_if_not_before_and_mlflow_the_model(store: Any) -> None:
    class Recorder(Logger):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def log_metrics(self, metrics: Any, epoch: int) -> None:
            self.calls.append((epoch, dict(metrics)))

        def finish(self, status: str) -> None:
            self.calls.append(status)

        def log_model(self, *arguments: Any) -> None:
            self.calls.append(arguments)

    history = [EpochMetrics(n, {"loss": 1.0 / (n + 1)}, {"mae": 2.0}) for n in range(3)]
    noted = record(store)
    run, document = noted._run, noted._document
    logged, user = LoggedRun("first", "0" * 40, 0, {}), Recorder()
    mlflow: Any = Recorder()
    with RunRecord(run, document, RunLoggers(logged, [user], [mlflow]), mlflow) as noted:
        handle = noted.handler(lambda event: None)
        for each in history[:2]:
            rows = [row[1:] for row in each.rows()]
            handle(RankEpoch(0, each.epoch, rows, {"learning_rate": 0.1}))
        # The last epoch's event is lost.
        noted.complete(history, "model", rows=len)  # type: ignore[arg-type]
    values = [{"loss": 1.0 / (n + 1), "val_mae": 2.0} for n in range(3)]
    epochs = [(n, {"learning_rate": 0.1, **values[n]}) for n in range(2)] + [(2, values[2])]
    assert user.calls == [*epochs, "finished"]
    assert mlflow.calls == [*epochs, ("model", len, 2), "finished"]

    interrupted = Recorder()
    loggers = RunLoggers(logged, [interrupted])
    with pytest.raises(KeyboardInterrupt), RunRecord(run, document, loggers):
        raise KeyboardInterrupt
    assert interrupted.calls == ["interrupted"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no such project")])
def test_loggers_finish_if_another_one_does_not_start(store: Any, error: BaseException) -> None:
    finished, calls = threading.Event(), []

    class Started(Logger):
        def log_metrics(self, metrics: Any, epoch: int) -> None:
            raise AssertionError

        def finish(self, status: str) -> None:
            calls.append(status)
            finished.set()

    class Starting(Started):
        def start(self, run: LoggedRun) -> None:
            if isinstance(error, ValueError):
                raise error
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            finished.wait(30)

    noted = record(store)
    loggers = RunLoggers(LoggedRun("first", "0" * 40, 0, {}), [Started(), Starting()])
    is_interrupt = isinstance(error, KeyboardInterrupt)
    expected = KeyboardInterrupt if is_interrupt else LoggerError
    try:
        with pytest.raises(expected), RunRecord(noted._run, noted._document, loggers):
            raise AssertionError
    finally:
        finished.set()
    assert calls == (["interrupted", "interrupted"] if is_interrupt else ["failed"])
