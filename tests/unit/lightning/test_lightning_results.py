"""An epoch that is resumed: logged values on other numbers of ranks."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torchmetrics import MeanSquaredError, MetricCollection

from hvd_estimators.lightning.package import FLAVORS, of_flavor
from hvd_estimators.lightning.results import RankResults, logged_so_far, restore_logged
from hvd_estimators.torch.metrics import metric_states, restore_metrics

FLAVOR = FLAVORS[1]


class Layer(torch.nn.Linear):
    calls = 0


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(2, 1)
        self.squared = MeanSquaredError()
        self.both = MetricCollection({"one": MeanSquaredError(), "two": MeanSquaredError()})


def trainer_of(module: Any, *callbacks: Any) -> Any:
    make = of_flavor(RankResults, FLAVOR)
    results, of_validation = make(training=True), make(training=False)
    seen = {name: {} for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics")}
    strategy = SimpleNamespace(reduce=torch.mean, root_device=torch.device("cpu"))
    loop = SimpleNamespace(_results=results, val_loop=SimpleNamespace(_results=of_validation))
    return SimpleNamespace(
        lightning_module=module,
        callbacks=list(callbacks),
        loggers=[],
        optimizers=[torch.optim.SGD(module.parameters(), 0.1)],
        lr_scheduler_configs=[],
        strategy=strategy,
        fit_loop=SimpleNamespace(epoch_loop=loop),
        _logger_connector=SimpleNamespace(_first_loop_iter=None),
        **seen,
    )


def log(trainer: Any, batches: list[list[float]]) -> None:
    """Log what a training step might, for batches of several sizes."""
    results, module = trainer.fit_loop.epoch_loop._results, trainer.lightning_module
    for rows in batches:
        batch = torch.tensor(rows)
        further = {"on_step": True, "sync_dist_fn": trainer.strategy.reduce}
        for name in ("mean", "max", "min", "sum"):
            value = getattr(batch, name)()
            results.log("step", name, value, reduce_fx=name, batch_size=len(rows), **further)
        module.squared(batch, batch * 0)
        module.both.update(batch, batch * 0)
        results.log("step", "squared", module.squared, batch_size=len(rows), **further)


PARTS = [[[1.0, 4.0], [2.0]], [[9.0], [5.0, 6.0, 7.0]], [[-3.0, 0.5]]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_of_several_ranks_become_those_of_fewer(ranks: int) -> None:
    states = []
    for batches in PARTS:
        one = trainer_of(Module())
        log(one, batches)
        state = logged_so_far(one), metric_states(one.lightning_module)
        states.append(pickle.loads(pickle.dumps(state)))
    for rank in range(ranks):
        found, expected = trainer_of(Module()), trainer_of(Module())
        restore_logged(found, [logged for logged, _ in states[rank::ranks]], FLAVOR)
        restore_metrics(found.lightning_module, [metrics for _, metrics in states[rank::ranks]])
        log(expected, [rows for batches in PARTS[rank::ranks] for rows in batches])
        # Both go on.
        for trainer in (found, expected):
            log(trainer, [[8.0, 10.0]])
        results, of_one = (t.fit_loop.epoch_loop._results for t in (found, expected))
        assert list(results) == list(of_one)
        for key in of_one:
            torch.testing.assert_close(results[key].compute(), of_one[key].compute())
        both = (t.lightning_module.both.compute() for t in (found, expected))
        torch.testing.assert_close(*both)
