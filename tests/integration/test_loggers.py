"""Loggers and event files of real fits: the driver writes them, and a resume continues them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from reference import write_rows
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from hvd_estimators.exceptions import LoggerError
from hvd_estimators.launch import LocalBackend
from hvd_estimators.loggers import LoggedRun, Logger

pytestmark = pytest.mark.integration


class Notes(Logger):
    """A user's logger, which writes its calls and its process to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, run: LoggedRun) -> None:
        if run.run_id == "rejected":
            raise ValueError("no such project")
        # An open file cannot be sent to ranks.
        self.file = self.path.open("a", buffering=1)
        self._note("start", vars(run))

    def log_metrics(self, metrics: Any, epoch: int) -> None:
        self._note("metrics", {"epoch": epoch, **metrics})

    def finish(self, status: str) -> None:
        self._note("finish", status)
        self.file.close()

    def _note(self, method: str, value: Any) -> None:
        self.file.write(json.dumps([os.getpid(), method, value]) + "\n")


def read_notes(path: Path) -> list[tuple[str, Any]]:
    """Return the calls of a logger, all of which came from the driver."""
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    assert {process for process, *_ in notes} == {os.getpid()}
    return [(method, value) for _, method, value in notes]


def check_notes(path: Path, metrics: list[dict[str, float]], parts: list[tuple[int, int]]) -> None:
    """Check the calls of a run with these metrics, in fits from and to some epochs."""
    notes, keys = read_notes(path), set()
    for first, last in parts:
        (method, run), *epochs, end = notes[: last - first + 2]
        notes = notes[last - first + 2 :]
        assert (method, run["run_id"], run["epoch"]) == ("start", "logged", first)
        assert run["hyperparameters"]["epochs"] == last
        keys.add(run["key"])
        for epoch, (method, values) in enumerate(epochs, start=first):
            assert (method, values.pop("epoch")) == ("metrics", epoch)
            assert values.pop("rows_per_second") > 0
            assert values == pytest.approx(metrics[epoch], rel=1e-6)
        assert end == ("finish", "finished")
    assert notes == []
    assert len(keys) == 1


def shown_scalars(logs: str) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard's accumulator reads: steps and values by tag."""
    events = EventAccumulator(logs).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def hparams_page(runs: str) -> dict[str, tuple[dict[str, Any], int, dict[str, float]]]:
    """Return the sessions of TensorBoard's page HParams: values, status and newest metrics."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(runs)
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, runs)
    request = api_pb2.ListSessionGroupsRequest(
        slice_size=9, allowed_statuses=api_pb2.Status.values()
    )
    context = Context(TBContext(logdir=runs, data_provider=provider))
    groups = Handler(RequestContext(), context, "", request).run().session_groups
    return {
        session.name: (
            {name: getattr(v, v.WhichOneof("kind")) for name, v in group.hparams.items()},
            session.status,
            {metric.name.tag: metric.value for metric in session.metric_values},
        )
        for group in groups
        for session in group.sessions
    }


def test_torch_logs_continue_after_a_resume(store: Any, tmp_path: Path) -> None:
    write_rows(Path(store.get_train_data_path()), 100)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)
    path = tmp_path / "notes"

    def fit(epochs: int, run_id: str = "logged") -> Any:
        return reference.fit(
            store,
            2,
            "sgd",
            backend=LocalBackend(2),
            epochs=epochs,
            batch_size=16,
            metrics=[[torch.nn.functional.l1_loss]],
            validation=0.1,
            run_id=run_id,
            scale_learning_rate=True,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            terminate_on_nan=True,
            loggers=[Notes(path)],
        )[0]

    fit(2)
    model = fit(3)
    # As for callbacks, the rate is that of one rank.
    rates = [0.05, 0.025, 0.0125]
    metrics = [
        {
            "learning_rate": rate,
            "loss": record["train"]["loss"],
            "l1_loss": record["train"]["all_metrics"][0]["l1_loss"],
            "val_loss": record["validation"]["loss"],
            "val_l1_loss": record["validation"]["all_metrics"][0]["l1_loss"],
        }
        for rate, record in zip(rates, model.getHistory(), strict=True)
    ]
    check_notes(path, metrics, [(0, 2), (2, 3)])

    scalars = shown_scalars(store.get_logs_path("logged"))
    assert [step for step, _ in scalars["rows_per_second"]] == [0, 1, 2]
    for tag, name in (
        ("learning_rate", "learning_rate"),
        ("train/loss", "loss"),
        ("validation/l1_loss", "val_l1_loss"),
    ):
        assert scalars[tag] == [
            (epoch, pytest.approx(values[name])) for epoch, values in enumerate(metrics)
        ]
    assert hparams_page(store.get_runs_path())["logged/logs"] == (
        {
            "batch_size": 16.0,
            "epochs": 3.0,
            "learning_rate": 0.05,
            "random_seed": 3.0,
            "scale_learning_rate": True,
            "shuffle": False,
            "terminate_on_nan": True,
            "validation": 0.1,
        },
        api_pb2.STATUS_SUCCESS,
        {tag: values[-1][1] for tag, values in scalars.items()},
    )


def test_a_new_run_whose_logger_cannot_start_leaves_nothing(store: Any, tmp_path: Path) -> None:
    write_rows(Path(store.get_train_data_path()), 40)
    expected = r"loggers: start\(\) of Notes failed: ValueError: no such project\."
    with pytest.raises(LoggerError, match=expected):
        reference.fit(store, 2, "sgd", run_id="rejected", loggers=[Notes(tmp_path / "notes")])
    assert not Path(store.get_runs_path(), "rejected").exists()
