"""Ranks that hold parts of the parameters end as one process, and resume from whole checkpoints."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import cloudpickle
import numpy as np
import pytest
import torch
from fewer_ranks import ThreeShards
from rank_pool import shared_ranks
from reference import WIDTH, Block, global_batches, write_rows
from resuming import DataDependent, kept_checkpoints
from torch.nn import functional
from variants import others_in_soak

from hvd_estimators import load_checkpoint
from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.store import LocalStore
from hvd_estimators.store.checkpoints import list_checkpoints
from hvd_estimators.torch import EarlyStopping, TorchEstimator

pytestmark = pytest.mark.integration

ROWS, BATCH_SIZE, CLIP = 37, 4, 0.5


class Net(torch.nn.Module):
    """Net of a list of layers, whose first and last layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(WIDTH, 6)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
        self.norm = torch.nn.LayerNorm(6)
        self.last = torch.nn.Linear(6, WIDTH)
        self.back = torch.nn.Linear(WIDTH, 6)
        self.back.weight = self.first.weight
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.back(self.last(self.norm(x))).sum(dim=1)


class Parts:
    """Callback that checks what a rank holds."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def on_train_begin(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        whole = sum(parameter.numel() for parameter in self.module.parameters())
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [value for p in trained for value in self.optimizer.state[p].values()]
        own = [parameter.to_local() for parameter in trained]
        assert {id(parameter) for parameter in trained} == set(map(id, self.module.parameters()))
        assert sum(part.numel() for part in own) <= 1.4 * whole / self.ranks
        moments = [value for value in states if torch.is_tensor(value) and value.dim()]
        assert len(moments) >= len(trained)
        assert sum(m.to_local().numel() for m in moments) <= 1.4 * whole / self.ranks * (
            len(moments) / len(trained)
        )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
}


class OfThreeShards(ThreeShards, TorchEstimator):
    """Run started with 3 ranks."""


@pytest.fixture(scope="module", autouse=True)
def _classes_of_this_file() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def fit(store: Any, ranks: int, net: torch.nn.Module, name: str = "adamw", **params: Any) -> Any:
    cls = params.pop("cls", TorchEstimator)
    return cls(
        **{
            **{"backend": shared_ranks(ranks), "store": store, "model": net},
            "optimizer": OPTIMIZERS[name](net.parameters()),
            "loss": functional.mse_loss,
            **{"feature_cols": ["features"], "label_cols": ["label"]},
            **{"batch_size": BATCH_SIZE, "epochs": 2, "random_seed": 3, "verbose": 0},
            **{"shuffle": False, "scale_learning_rate": False, "sharding": "full"},
            **params,
        }
    ).fit_on_parquet()


def optimizer_state(store: Any, run_id: str) -> dict[int, Any]:
    """Return the optimizer's state in the newest checkpoint of a run."""
    state: dict[int, Any] = load_checkpoint(store, run_id).content["optimizer"]["state"]
    return state


def train_alone(
    columns: dict[str, np.ndarray], ranks: int, name: str, passes: int = 1
) -> torch.nn.Module:
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    batches = global_batches(ROWS, ranks, BATCH_SIZE)
    for _ in range(2):
        for first in range(0, len(batches), passes):
            rows = np.concatenate(batches[first : first + passes])
            optimizer.zero_grad()
            outputs = net(torch.from_numpy(columns["features"][rows]))
            functional.mse_loss(outputs, torch.from_numpy(columns["label"][rows])).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
    return net


def assert_same(found: torch.nn.Module, expected: torch.nn.Module, tolerance: float) -> None:
    moved = [
        (a - b).abs().max() for a, b in zip(expected.parameters(), Net().parameters(), strict=True)
    ]
    assert min(moved) > 1e-3
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert type(a) is torch.nn.Parameter
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("name", "ranks", "params"),
    [
        ("momentum", 2, {}),
        ("adam", 4, {"sharding": "optimizer"}),
        ("adamw", 4, {"activation_checkpointing": True, "cpu_offload": True}),
        ("adamw", 2, {"cls": OfThreeShards, "backward_passes_per_step": 2}),
    ],
)
def test_ranks_train_as_one_process(
    store: Any, name: str, ranks: int, params: dict[str, Any]
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    net = Net()
    model = fit(
        *(store, ranks, net, name),
        **params,
        callbacks=[Parts(ranks)],
        gradient_clip_norm=CLIP,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        lr_scheduler_interval="step",
    )
    shards = 3 if "cls" in params else ranks
    passes = params.get("backward_passes_per_step", 1)
    alone = train_alone(columns, shards, name, passes)
    assert_same(model.getModel(), alone, 1e-5)
    assert model.getModel().back.weight is model.getModel().first.weight
    # Activations that were computed again count as a forward pass of a block, not of the net.
    state = model.getOptimizer().state_dict()["state"]
    assert all(
        type(v) is torch.Tensor for of in state.values() for v in of.values() if v is not None
    )


def test_bfloat16_computes_in_16_bits_and_trains_in_32(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)

    class Seen(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.distributed.is_initialized() and self.training:
                assert self.first.weight.dtype == torch.bfloat16
            return super().forward(x)

    sharded = fit(store, 2, Seen(), precision="bf16").getModel()
    whole = fit(store, 2, Net(), sharding="none", precision="bf16").getModel()
    exact = fit(store, 2, Net(), sharding="none").getModel()
    assert all(parameter.dtype == torch.float32 for parameter in sharded.parameters())

    def distance(net: torch.nn.Module) -> float:
        pairs = zip(net.parameters(), exact.parameters(), strict=True)
        return sum(float((a - b).detach().square().sum()) for a, b in pairs)

    assert 0 < distance(sharded) < 4 * distance(whole) + 1e-4


# Adam would magnify the rounding errors of a bias before batch normalization.
@pytest.mark.parametrize(("make", "name"), [(DataDependent, "momentum"), (Net, "adamw")])
def test_a_run_resumes_on_the_same_and_on_fewer_ranks_and_without_sharding(
    store: Any, make: Callable[[], torch.nn.Module], name: str
) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    given = {"checkpoint_every_n_steps": 1, "keep_checkpoints": 99}
    model = fit(store, 2, make(), name, run_id="mine", **given)
    weights, state = model.getModel().state_dict(), optimizer_state(store, "mine")
    others: list[dict[str, Any]] = [{}, {"sharding": "none"}, {"ranks": 1}]
    positions = []
    for number, (run_id, position) in enumerate(kept_checkpoints(store, "mine")):
        positions.append(position)
        params = {"ranks": 2, **others[number % 3]}
        same = fit(store, params.pop("ranks"), make(), name, run_id=run_id, **params)
        exact = {"rtol": 0, "atol": 0} if number % 3 == 0 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(same.getModel().state_dict(), weights, **exact)
        torch.testing.assert_close(optimizer_state(store, run_id), state, **exact)
    # Each step of two epochs of five steps, of 8 rows but the last one.
    within = [(epoch, rows) for epoch in (0, 1) for rows in (8, 16, 24, 32)]
    assert positions == sorted([*within, (1, 0), (2, 0)])


class Odd(torch.nn.Module):
    """Net with recurrent layers, lists in lists, and state beside weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.recurrent = torch.nn.GRU(WIDTH, 6, batch_first=True)
        lists = [torch.nn.ModuleDict({"a": Block()}), torch.nn.ModuleDict({"a": Block()})]
        self.blocks = torch.nn.ModuleList(lists)
        self.last = torch.nn.Linear(6, 1)
        self.register_buffer("grown", torch.zeros(1), persistent=False)
        self.register_buffer("made", None, persistent=False)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.grown = torch.ones(3)
            self.made = torch.ones(2)
        x = self.recurrent(x[:, None])[0][:, 0]
        for blocks in self.blocks:
            x = blocks["a"](x)
        return self.last(x)[:, 0]

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_odd_modules_end_as_without_sharding(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 32)
    found, expected = (fit(store, 2, Odd(), sharding=mode).getModel() for mode in ("full", "none"))
    torch.testing.assert_close(
        dict(found.named_parameters()), dict(expected.named_parameters()), rtol=1e-5, atol=1e-5
    )
    assert found.steps == expected.steps == 2 * 4
    assert (len(found.grown), len(found.made)) == (3, 2)
    assert found(torch.ones(2, WIDTH)).isfinite().all()


class Factored(torch.optim.Optimizer):
    """Optimizer whose state has one number per row of a parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            squares = parameter.grad.pow(2)
            rows = squares.flatten(1).mean(1) if parameter.dim() > 1 else squares
            state = self.state[parameter]
            state["rows"] = rows + 0.9 * state["rows"] if state else rows
            scale = state["rows"].sqrt().reshape(-1, *[1] * (parameter.dim() - 1)) + 1e-3
            parameter -= 0.01 * parameter.grad / scale


def test_a_run_resumes_where_a_rank_has_no_rows_left(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 5)

    def trained(run_id: str) -> Any:
        net = Net()
        params = {"batch_size": 1, "checkpoint_every_n_steps": 1, "keep_checkpoints": 99}
        optimizer = Factored(net.parameters())
        return fit(store, 2, net, run_id=run_id, optimizer=optimizer, **params).getModel()

    expected = trained("mine")
    resumed = [run_id for run_id, (_, rows) in kept_checkpoints(store, "mine") if rows == 4]
    assert len(resumed) == 2
    for run_id in resumed:
        torch.testing.assert_close(
            trained(run_id).state_dict(), expected.state_dict(), rtol=0, atol=0
        )


def test_the_best_weights_are_restored_after_a_resume(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    write_rows(Path(store.get_val_data_path()), 9, seed=1)

    def trained(ranks: int = 2, **params: Any) -> Any:
        # The losses fall, so the first epoch has the largest.
        stopping = EarlyStopping("val_loss", patience=9, mode="max", restore_best=True)
        # One rank has a batch less than the other one.
        given = {"validation": 0.5, "val_batch_size": 1, "callbacks": [stopping], "epochs": 4}
        return fit(store, ranks, Net(), **{**given, **params})

    expected = trained(sharding="none")
    losses = [record["validation"]["loss"] for record in expected.getHistory()]
    assert losses.index(max(losses)) == 0
    found = trained(run_id="mine", keep_checkpoints=9)
    assert_same(found.getModel(), expected.getModel(), 1e-5)
    of_epochs = [record["validation"]["loss"] for record in found.getHistory()]
    assert of_epochs == pytest.approx(losses, rel=1e-5)
    for number, (run_id, (epoch, _)) in enumerate(kept_checkpoints(store, "mine")):
        params: dict[str, Any] = [{}, {"sharding": "none"}, {"ranks": 1}][number % 3]
        resumed = trained(run_id=run_id, **params)
        assert len(resumed.getHistory()) == 4 > epoch - 1
        assert_same(resumed.getModel(), expected.getModel(), 1e-5)


class DyingStore(LocalStore):
    """Store whose process is killed while it writes a file of the second epoch's checkpoint."""

    dies_at = ""

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        with super().open_atomic(path) as file:
            yield file
            if self.dies_at and fnmatch.fnmatch(path, f"*{self.dies_at}*"):
                file.flush()
                Path(self.folder, "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = [f"000002.tensors/*-0000{rank}-of-00002" for rank in (1, 2)] + [
    "000002.ckpt",
    "000002.json",
]


@pytest.mark.parametrize("moment", others_in_soak(*MOMENTS[::-1]))
def test_a_checkpoint_that_is_killed_in_parts_is_the_old_one(tmp_path: Path, moment: str) -> None:
    store = DyingStore(str(tmp_path))
    write_rows(Path(store.get_train_data_path()), ROWS)
    expected = fit(store, 2, Net(), run_id="whole", keep_checkpoints=9)
    store.dies_at = moment
    with pytest.raises(WorkerFailedError):
        fit(store, 2, Net(), run_id="mine", backend=LocalBackend(2))
    assert Path(store.folder, "killed").exists()
    store.dies_at = ""
    first, _ = list_checkpoints(store, store.run_paths("whole"))
    old, kept = load_checkpoint(first.path), load_checkpoint(store, "mine")
    assert kept.epoch == 1
    torch.testing.assert_close(kept.content["model"], old.content["model"], rtol=0, atol=0)
    resumed = fit(store, 2, Net(), run_id="mine")
    torch.testing.assert_close(
        resumed.getModel().state_dict(), expected.getModel().state_dict(), rtol=0, atol=0
    )
    names = {path.name for path in Path(store.get_checkpoint_path("mine") or "").rglob("*.tensors")}
    assert names == {"checkpoint-000001.tensors", "checkpoint-000002.tensors"}


def test_an_optimizer_with_a_state_continues_on_parts(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    ends = []
    for sharding in ("full", "none"):
        net = Net()
        optimizer = OPTIMIZERS["adam"](net.parameters())
        functional.mse_loss(
            net(torch.from_numpy(columns["features"])), torch.from_numpy(columns["label"])
        ).backward()
        optimizer.step()
        ends.append(fit(store, 2, net, optimizer=optimizer, sharding=sharding).getModel())
    assert_same(*ends, 1e-5)


class Halving:
    """Callback that halves the learning rate."""

    def on_train_begin(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def test_the_returned_optimizer_has_the_rate_of_the_end(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), ROWS)
    params: dict[str, Any] = {"learning_rate": 0.08, "callbacks": [Halving()]}
    for sharding in ("full", "none"):
        net = Net()
        optimizer = OPTIMIZERS["adam"](net.parameters())
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # it leaves an initial rate
        fitted = fit(store, 2, net, sharding=sharding, optimizer=optimizer, **params)
        (group,) = fitted.getOptimizer().param_groups
        assert group["lr"] == 0.02
        assert "initial_lr" not in group
