"""Calls of Weights & Biases' and Comet's clients, with modules that have their signatures."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest

from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.fitting.record import hyperparameters
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.loggers import CometLogger, LoggedRun, Logger, WandbLogger
from hvd_estimators.torch import TorchEstimator

RUN = LoggedRun("first", "0123456789" * 4, 0, {"batch_size": 8, "loss": "mse"})


class WandbRun:
    """Methods of ``wandb.Run`` with arguments of wandb 0.31; a list records the calls."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def define_metric(self, name: str, step_metric: Any = None) -> None:
        self.calls.append(("define_metric", name, step_metric))

    def log(self, data: dict[str, Any]) -> None:
        self.calls.append(("log", data))

    def finish(self, exit_code: int | None = None) -> None:
        self.calls.append(("finish", exit_code))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    names = {"project", "id", "name", "tags", "config", "allow_val_change", "mode", "resume"}

    def init(**given: Any) -> WandbRun:
        assert names >= given.keys()
        calls.append(("init", given))
        return WandbRun(calls)

    module: Any = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def run_through(logger: Logger, run: LoggedRun = RUN, status: str = "finished") -> None:
    """Call a copy of a logger as a fit does."""
    copied = copy.copy(logger)
    copied.start(run)
    copied.log_metrics({"loss": 0.5, "val_loss": 0.75}, 3)
    copied.finish(status)


def test_wandb_continues_the_run_of_the_same_name(wandb: list[Any]) -> None:
    run_through(WandbLogger(project="prices", tags=["small"], config={"note": "mine"}))
    assert wandb == [
        (
            "init",
            {
                "project": "prices",
                "tags": ["small"],
                "id": "first-01234567",
                "name": "first",
                "resume": "allow",
                "allow_val_change": True,
                "config": {"batch_size": 8, "loss": "mse", "note": "mine"},
            },
        ),
        ("define_metric", "*", "epoch"),
        ("log", {"epoch": 3, "loss": 0.5, "val_loss": 0.75}),
        ("finish", 0),
    ]
    wandb.clear()
    run_through(WandbLogger(id="mine", mode="offline"), status="failed")
    assert wandb[0][1]["id"] == "mine"
    assert wandb[-1] == ("finish", 1)


class CometExperiment:
    """Methods of ``comet_ml.CometExperiment`` with arguments of comet_ml 3.58."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def set_name(self, name: str) -> None:
        self.calls.append(("set_name", name))

    def log_parameters(self, parameters: dict[str, Any]) -> None:
        self.calls.append(("log_parameters", parameters))

    def log_metrics(
        self, dic: dict[str, Any], step: int | None = None, epoch: int | None = None
    ) -> None:
        self.calls.append(("log_metrics", dic, step, epoch))

    def log_other(self, key: Any, value: Any) -> None:
        self.calls.append(("log_other", key, value))

    def end(self) -> None:
        self.calls.append(("end",))


def test_comet_continues_the_experiment_with_the_run_key(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def start(project_name: str, workspace: str, experiment_key: str, mode: str) -> CometExperiment:
        calls.append(("start", project_name, workspace, experiment_key, mode))
        return CometExperiment(calls)

    module: Any = ModuleType("comet_ml")
    module.start = start
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    run_through(CometLogger("prices", workspace="team"), status="interrupted")
    assert calls == [
        ("start", "prices", "team", RUN.key, "get_or_create"),
        ("set_name", "first"),
        ("log_parameters", {"batch_size": 8, "loss": "mse"}),
        ("log_metrics", {"loss": 0.5, "val_loss": 0.75}, 3, 3),
        ("log_other", "status", "interrupted"),
        ("end",),
    ]


def test_a_missing_client_names_the_place_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for logger, package in ((WandbLogger(), "wandb"), (CometLogger(), "comet_ml")):
        monkeypatch.setitem(sys.modules, package, None)
        expected = rf"{package}, which {sys.executable} cannot import.*on the driver: pip install"
        with pytest.raises(DependencyError, match=expected):
            logger.start(RUN)


def test_loggers_are_objects_of_torch_and_keras_estimators() -> None:
    assert TorchEstimator(loggers=[WandbLogger("prices")]).getLoggers()[0]._init["project"]
    for given in (WandbLogger, "wandb"):
        with pytest.raises(ParamError, match=r"loggers: expected objects of subclasses of .*Set "):
            TorchEstimator(loggers=[given])
    with pytest.raises(ParamError, match="loggers: expected a list"):
        TorchEstimator(loggers=WandbLogger())
    wrong = LightningEstimator(loggers=[WandbLogger()])
    with pytest.raises(ParamError, match=r"loggers: it is a param of TorchEstimator\. Set logger"):
        Fit(wrong).framework.check()


def test_hyperparameters_are_the_plain_values_that_were_set() -> None:
    estimator = TorchEstimator(
        model=len,
        model_args={"hidden": 64, "activation": "relu", "api_key": "secret", "sizes": [1, 2]},
        batch_size=64,
        store="/shared/experiments",
        run_id="first",
        loggers=[WandbLogger()],
        feature_cols=["a", "b"],
        precision="bf16",
        terminate_on_nan=True,
    )
    expected = {
        "batch_size": 64,
        "model_args/hidden": 64,
        "model_args/activation": "relu",
        "precision": "bf16",
        "terminate_on_nan": True,
    }
    assert hyperparameters(estimator, []) == expected
    assert hyperparameters(estimator, [0.1, 0.1]) == {**expected, "learning_rate": 0.1}
    assert hyperparameters(estimator, [0.1, 0.2]) == expected
