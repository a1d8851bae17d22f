"""LightningModules whose parameters the ranks share train as one process, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import InProcessBackend
from fewer_ranks import ThreeShards
from lightning_reference import Regression, fit
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint, StochasticWeightAveraging
from rank_pool import shared_ranks
from reference import WIDTH, Block, global_batches, write_rows
from resuming import kept_checkpoints
from torch.nn import functional
from torchmetrics import MeanSquaredError

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning import LightningEstimator

pytestmark = pytest.mark.integration

ROWS, BATCH_SIZE, CLIP = 37, 4, 0.5


class Module(LightningModule):
    """Module with a list of layers, a parameter, and a step that calls itself and layers.

    Checks that each rank holds a part of the parameters.
    """

    def __init__(self, name: str = "adamw", lazily: bool = False) -> None:
        super().__init__()
        self.name = name
        self.blocks: Any = None
        self.squared = MeanSquaredError()
        if not lazily:
            self.configure_model()

    def configure_model(self) -> None:
        if self.blocks is None:
            torch.manual_seed(3)
            self.first = torch.nn.Linear(WIDTH, 6)
            self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
            self.last = torch.nn.Linear(6, WIDTH)
            self.back = torch.nn.Linear(WIDTH, 6)
            self.back.weight = self.first.weight
            self.factor = torch.nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.back(self.last(x * self.factor)).sum(dim=1)

    def on_train_epoch_start(self) -> None:
        self.seen: list[Any] = []  # a resumed epoch repeats it, and keeps the restored state

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = functional.mse_loss(self(batch["features"]), batch["label"])
        self.log("train_mse", loss)
        return loss + 0.01 * self.last(batch["features"] @ self.first.weight.T).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.squared(self(batch["features"]), batch["label"])
        self.log("val_metric", self.squared)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if torch.distributed.is_initialized() and (ranks := torch.distributed.get_world_size()) > 1:
            whole = sum(parameter.numel() for parameter in parameters)
            parts = [
                parameter.to_local() for parameter in parameters if hasattr(parameter, "to_local")
            ]
            assert not parts or sum(part.numel() for part in parts) <= 1.4 * whole / ranks
        if self.name == "momentum":
            optimizer: Any = torch.optim.SGD(parameters, 0.02, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(store: Any, name: str = "adamw", ranks: int = 2, **params: Any) -> Any:
    given: dict[str, Any] = {
        **{"model": Module(name), "batch_size": BATCH_SIZE, "epochs": 2, "sharding": "full"},
        "trainer_args": {"gradient_clip_val": CLIP},
    }
    return fit(shared_ranks(ranks), store, **{**given, **params})


def train_alone(columns: dict[str, np.ndarray], ranks: int, name: str, passes: int) -> Module:
    module = Module(name)
    (optimizer,), (schedule,) = module.configure_optimizers()
    module.log = lambda *_: None  # type: ignore[method-assign, assignment]
    batches = global_batches(ROWS, ranks, BATCH_SIZE)
    for _ in range(2):
        for first in range(0, len(batches), passes):
            rows = np.concatenate(batches[first : first + passes])
            batch = {n: torch.from_numpy(columns[n][rows]) for n in ("features", "label")}
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            schedule["scheduler"].step()
    return module


@pytest.mark.parametrize(
    ("name", "ranks", "params"),
    [
        ("momentum", 2, {}),
        ("adamw", 2, {"sharding": "optimizer", "backward_passes_per_step": 2}),
        ("adamw", 4, {"activation_checkpointing": True, "model": Module(lazily=True)}),
    ],
)
def test_ranks_train_a_lightning_module_as_one_process(
    store: Any, name: str, ranks: int, params: dict[str, Any]
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    found = train(store, name, ranks, **params).getModel()
    alone = train_alone(columns, ranks, name, params.get("backward_passes_per_step", 1))
    begun = Module()
    for (name_of, expected), start in zip(
        alone.named_parameters(), begun.parameters(), strict=True
    ):
        value = found.get_parameter(name_of)
        assert type(value) is torch.nn.Parameter
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=name_of)
        assert (expected - start).abs().max() > 1e-3
    assert found.back.weight is found.first.weight


def test_a_shared_module_resumes_on_the_same_and_fewer_ranks_and_without_sharding(
    store: Any,
) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    given = {"checkpoint_every_n_steps": 1, "keep_checkpoints": 99}
    weights = train(store, run_id="mine", **given).getModel().state_dict()
    others: list[dict[str, Any]] = [{}, {"sharding": "none"}, {"ranks": 1}]
    runs = [*kept_checkpoints(store, "mine")]
    assert len(runs) == 10
    for number, (run_id, _) in enumerate([*runs[1:4], runs[-2]]):
        same = train(store, run_id=run_id, **others[number % 3])
        tolerance = 0.0 if number % 3 == 0 else 1e-5
        torch.testing.assert_close(
            same.getModel().state_dict(), weights, rtol=tolerance, atol=tolerance
        )


def test_a_shared_module_validates_and_returns_its_best_weights(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    write_rows(Path(store.get_val_data_path()), 7, seed=1)
    given: dict[str, Any] = {"validation": True, "val_batch_size": 2, "epochs": 3}
    fitted = [
        train(
            *(store, "momentum"),
            **given,
            sharding=sharding,
            callbacks=[ModelCheckpoint(monitor="val_metric", mode="max")],
        )
        for sharding in ("full", "none")
    ]
    for found, expected in zip(*(model.getHistory() for model in fitted), strict=True):
        for stage in ("train", "validation"):
            assert found[stage] == pytest.approx(expected[stage], rel=1e-5)
    torch.testing.assert_close(
        *(model.getModel().state_dict() for model in fitted), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ParamError, match="val_batch_size: the processes validate on 3 to 4 batch"):
        train(store, **{**given, "val_batch_size": 1})


class Manual(Module):
    """Module that steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OfThreeShards(ThreeShards, LightningEstimator):
    """Run started with 3 ranks."""


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"model": Manual()}, r"^model: found manual optimization with sharding='full'"),
        ({"trainer_args": {"precision": "16-mixed"}}, r"^trainer_args: found precision='16-mixed'"),
        ({"shard_modules": ["Conv"]}, r"^shard_modules: the model has no layer of class 'Conv'"),
        ({"collectives": "horovod"}, r"^collectives: found 'horovod'"),
        (
            {"trainer_args": {"callbacks": [StochasticWeightAveraging(swa_lrs=0.1)]}},
            r"^callbacks: found a StochasticWeightAveraging with sharding='full'",
        ),
        ({"kind": OfThreeShards}, r"^num_proc: found 2 processes for a run that began with 3"),
    ],
)
def test_what_lightning_cannot_shard_is_named(
    store: Any, params: dict[str, Any], message: str
) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    with pytest.raises(ParamError, match=message):
        train(store, **{"model": Regression(), **params})


def test_sharding_on_one_process_is_a_warning(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(Path(store.get_train_data_path()), 16)
    fit(InProcessBackend(), store, sharding="full", batch_size=16)
    assert "sharding: one process has nothing to share" in caplog.text
