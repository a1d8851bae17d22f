"""HorovodStrategy in the ranks of a LocalBackend, compared with one process in torch."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, EarlyStopping, TQDMProgressBar
from torchmetrics import MeanMetric

from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.lightning import HorovodStrategy

ROWS, WIDTH, BATCH = 48, 3, 4


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, (x @ torch.tensor([1.0, -2.0, 3.0]) + 1.0)[:, None]


def make_net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


class Module(LightningModule):
    """Module with one optimizer, and a scheduler that changes the rate in every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.unused = torch.nn.Linear(2, 2)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        error = torch.nn.functional.l1_loss(self.net(x), y)
        self.log("synced", error, sync_dist=True)
        self.log("alone", error)
        self.mean.update(error, len(x))
        self.log("metric", self.mean)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Contrastive(Module):
    """Module with a contrastive loss over two views of the rows of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        views = [self.net(batch[0]), self.net(batch[0] * 1.5)]
        return contrast(*(self.all_gather(v, sync_grads=True).flatten(0, 1) for v in views))

    def configure_optimizers(self) -> Any:
        # Adam's steps are equal for a gradient and half of it.
        return torch.optim.SGD(self.parameters(), lr=0.1)


def contrast(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the InfoNCE loss, which matches each row of one view with its other view."""
    scores = first @ second.T
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))


class FirstRankReader(Callback):
    """Callback that reads metrics only on the first rank, like a progress bar."""

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}

    def look(self, hook: str, trainer: Any) -> None:
        if trainer.is_global_zero:
            values = {**trainer.progress_bar_metrics, **trainer.callback_metrics}
            self.read[hook] = {name: float(value) for name, value in values.items()}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.look("batch", trainer)

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.look("validation epoch", trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.look("validation", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.look("epoch", trainer)


class Measured(Module):
    """Module that logs in every way."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("hook", float(self.trainer.global_rank), sync_dist=True)
        if self.trainer.is_global_zero:
            self.log("first only", 5.0)

    def on_validation_epoch_end(self) -> None:
        self.log("validation hook", float(self.trainer.global_rank), sync_dist=True)


class Alternating(Module):
    """Module with two manual optimizers; the second loss depends on the first step."""

    def __init__(self, plain_backward: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plain_backward = plain_backward
        torch.manual_seed(2)
        self.critic = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        backward = torch.Tensor.backward if self.plain_backward else self.manual_backward
        alternate(self.net, self.critic, *self.optimizers(), batch, backward)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9),
            torch.optim.Adam(self.critic.parameters(), lr=0.02),
        ]


def alternate(net: Any, critic: Any, first: Any, second: Any, batch: Any, backward: Any) -> None:
    x, y = batch
    output = net(x)
    first.zero_grad()
    backward(torch.nn.functional.mse_loss(output, y) - 0.1 * critic(output).mean())
    first.step()
    second.zero_grad()
    gap = critic(net(x).detach()).mean() - critic(y).mean()
    backward(gap + 0.1 * critic.weight.square().sum())
    second.step()


class Watcher(Callback):
    """Callback that records rates and norms of gradients."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in pl_module.net.parameters()]
        self.norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def strategy_of(**params: Any) -> HorovodStrategy:
    # The ranks may have imported both Lightning packages.
    return HorovodStrategy(package="pytorch_lightning", **params)


def loader(rank: int, size: int, rows: Any = None) -> Any:
    """Return batches that over all ranks form batches of BATCH * size rows."""
    x, y = make_data()
    indices = rows if rows is not None else torch.arange(rank, len(x), size)
    dataset = torch.utils.data.TensorDataset(x[indices], y[indices])
    return torch.utils.data.DataLoader(dataset, BATCH)


def fit(
    module: LightningModule,
    rank: int,
    size: int,
    strategy: Any = None,
    ckpt_path: str | None = None,
    val_dataloaders: Any = None,
    **kwargs: Any,
) -> Any:
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "strategy": strategy or strategy_of(scale_learning_rate=False),
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            **kwargs,
        }
    )
    trainer.fit(module, loader(rank, size), val_dataloaders, ckpt_path=ckpt_path)
    return trainer


def run_all(directory: str) -> dict[str, Any]:
    """Train in every way on this rank, in a single launch, and return all results."""
    import warnings

    import horovod.torch as hvd

    warnings.simplefilter("ignore")
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    found: dict[str, Any] = {}

    def keep(name: str, module: LightningModule) -> None:
        found[name] = copy.deepcopy(module.state_dict())

    plain = Module()
    fit(plain, rank, size)
    keep("automatic", plain)

    accumulated = Module()
    fit(accumulated, rank, size, accumulate_grad_batches=2)
    keep("accumulated", accumulated)

    contrastive = Contrastive()
    fit(contrastive, rank, size)
    keep("contrastive", contrastive)

    watcher, clipped = Watcher(), Module()
    fit(clipped, rank, size, gradient_clip_val=0.5, callbacks=[watcher])
    keep("clipped", clipped)
    found["norms"] = watcher.norms

    for name, plain_backward in (("manual", False), ("plain backward", True)):
        alternating = Alternating(plain_backward)
        fit(alternating, rank, size)
        keep(name, alternating)

    low = Module()
    fit(low, rank, size, precision="bf16-mixed")
    keep("bf16", low)

    watcher, scaled = Watcher(), Module()
    trainer = fit(scaled, rank, size, strategy_of(), callbacks=[watcher])
    keep("scaled", scaled)
    found["rates"] = [*watcher.rates, trainer.optimizers[0].param_groups[0]["lr"]]
    found["class"] = type(trainer.optimizers[0]) is torch.optim.AdamW
    hooks = trainer.optimizers[0]._optimizer_step_pre_hooks
    left = [p._post_accumulate_grad_hooks for p in scaled.parameters()]
    found["hooks"] = bool(hooks) or any(left)

    trainer.save_checkpoint(str(Path(directory) / "x.ckpt"))
    again = Module()
    path = str(Path(directory) / "x.ckpt")
    fit(again, rank, size, strategy_of(), ckpt_path=path, max_epochs=3)
    keep("resumed", again)
    whole = Module()
    fit(whole, rank, size, strategy_of(), max_epochs=3)
    keep("whole", whole)

    # 5 rows on rank 0 and 3 on rank 1: the mean over ranks is not the mean over rows.
    rows = torch.arange(5) if rank == 0 else torch.arange(5, 8)
    measured = Module()
    validator = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy_of(),
        logger=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    (found["validated"],) = validator.validate(measured, loader(rank, size, rows), verbose=False)

    reader, read = FirstRankReader(), Measured()
    stop = EarlyStopping("hook", patience=0, check_on_train_epoch_end=True)
    held_out = loader(rank, size, rows)
    settings = {"callbacks": [reader, TQDMProgressBar(), stop], "enable_progress_bar": True}
    done = fit(read, rank, size, val_dataloaders=held_out, max_epochs=3, **settings)
    found["read"] = {**reader.read, "end": {n: v.item() for n, v in done.callback_metrics.items()}}
    keep("measured", read)
    found["stopped"] = done.current_epoch

    strategy = validator.strategy
    own = torch.tensor([1.0 + rank, 2.0])
    found["collectives"] = {
        "mean": strategy.reduce(own).tolist(),
        "sum": strategy.reduce(own.bfloat16(), reduce_op="sum").tolist(),
        "max": strategy.reduce(torch.tensor(rank), reduce_op=torch.distributed.ReduceOp.MAX).item(),
        "gathered": strategy.all_gather(own).tolist(),
        "flags": strategy.all_gather(torch.tensor([rank == 0])).tolist(),
        "told": strategy.broadcast({"from": rank}, src=1),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
        "all": strategy.reduce_boolean_decision(rank == 0),
    }
    strategy.barrier("done")
    leaf = torch.ones(2, requires_grad=True)
    (strategy.all_gather(leaf * (rank + 1), sync_grads=True)[0].sum()).backward()
    found["gradient"] = leaf.grad.tolist()
    # Tensors by value: the processes share no memory with the test's process.
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return {"document": buffer.getvalue()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    import sys

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    answers = LocalBackend(2).run(run_all, args=(str(tmp_path_factory.mktemp("ckpt")),))
    return [torch.load(io.BytesIO(answer["document"]), weights_only=False) for answer in answers]


def global_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = make_data()
    share = [torch.arange(rank, ROWS, 2) for rank in range(2)]
    steps = len(share[0]) // BATCH
    rows = [torch.cat([s[i * BATCH : (i + 1) * BATCH] for s in share]) for i in range(steps)]
    return [(x[r], y[r]) for r in rows]


def contrast_alone() -> torch.nn.Module:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for x, _ in global_batches():
            optimizer.zero_grad()
            contrast(net(x), net(x * 1.5)).backward()
            optimizer.step()
    return net


def train_alone(
    passes: int = 1, clip: float | None = None, lr: float = 0.01, epochs: int = 2
) -> torch.nn.Module:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    batches = global_batches()
    for _ in range(epochs):
        for first in range(0, len(batches), passes):
            optimizer.zero_grad()
            for x, y in batches[first : first + passes]:
                (torch.nn.functional.mse_loss(net(x), y) / passes).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        scheduler.step()
    return net


def alternate_alone() -> dict[str, torch.Tensor]:
    net = make_net()
    torch.manual_seed(2)
    critic = torch.nn.Linear(1, 1)
    first = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    second = torch.optim.Adam(critic.parameters(), lr=0.02)
    for _ in range(2):
        for batch in global_batches():
            alternate(net, critic, first, second, batch, torch.Tensor.backward)
    return {**prefixed(net), **{f"critic.{k}": v for k, v in critic.state_dict().items()}}


def prefixed(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"net.{name}": value for name, value in net.state_dict().items()}


def assert_trained_as(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("automatic", {}),
        ("accumulated", {"passes": 2}),
        ("clipped", {"clip": 0.5}),
        ("scaled", {"lr": 0.02}),
    ],
)
def test_two_ranks_train_as_one_process(ranks: Any, name: str, arguments: Any) -> None:
    assert_trained_as(ranks[0][name], prefixed(train_alone(**arguments)))


@pytest.mark.integration
def test_losses_over_gathered_rows_have_the_gradient_of_one_process(ranks: Any) -> None:
    assert_trained_as(ranks[0]["contrastive"], prefixed(contrast_alone()))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["manual", "plain backward"])
def test_two_manual_optimizers_train_as_in_one_process(ranks: Any, name: str) -> None:
    assert_trained_as(ranks[0][name], alternate_alone())


@pytest.mark.integration
def test_ranks_end_with_identical_weights(ranks: Any) -> None:
    for name in ("automatic", "accumulated", "clipped", "manual", "bf16", "scaled", "resumed"):
        for key, value in ranks[0][name].items():
            assert torch.equal(value, ranks[1][name][key]), (name, key)


@pytest.mark.integration
def test_bfloat16_trains_about_like_float32(ranks: Any) -> None:
    expected = prefixed(train_alone())
    for name, value in expected.items():
        torch.testing.assert_close(ranks[0]["bf16"][name], value, rtol=0.1, atol=0.03)
    assert any(not torch.equal(ranks[0]["bf16"][n], ranks[0]["automatic"][n]) for n in expected)


@pytest.mark.integration
def test_parameters_without_a_gradient_do_not_change(ranks: Any) -> None:
    torch.manual_seed(1)
    fresh = Module().unused.weight
    # Weight decay would change the parameter if it had a gradient of zeros.
    assert torch.equal(ranks[0]["automatic"]["unused.weight"], fresh)


@pytest.mark.integration
def test_callbacks_see_averaged_gradients_and_unscaled_rates(ranks: Any) -> None:
    assert ranks[0]["norms"] == ranks[1]["norms"]
    assert max(ranks[0]["norms"]) > 0.5
    assert ranks[0]["rates"] == [0.01, 0.005, 0.0025]


@pytest.mark.integration
def test_optimizer_and_parameters_are_restored_after_training(ranks: Any) -> None:
    assert [rank["class"] for rank in ranks] == [True, True]
    assert [rank["hooks"] for rank in ranks] == [False, False]


@pytest.mark.integration
def test_a_checkpoint_is_restored_on_all_ranks(ranks: Any) -> None:
    for rank in ranks:
        for name, value in rank["whole"].items():
            assert torch.equal(value, rank["resumed"][name]), name


@pytest.mark.integration
def test_logged_values_are_reduced_by_rows(ranks: Any) -> None:
    x, y = make_data()
    with torch.no_grad():
        errors = (Module().net(x[:8]) - y[:8]).abs()
    for rank, own in zip(ranks, (errors[:5], errors[5:]), strict=True):
        assert rank["validated"]["synced"] == pytest.approx(errors.mean().item(), rel=1e-5)
        assert rank["validated"]["metric"] == pytest.approx(errors.mean().item(), rel=1e-5)
        assert rank["validated"]["alone"] == pytest.approx(own.mean().item(), rel=1e-5)


@pytest.mark.integration
def test_a_single_rank_may_read_metrics_in_any_hook(ranks: Any) -> None:
    x, y = make_data()
    read = ranks[0]["read"]
    net = make_net()
    net.load_state_dict({k[4:]: v for k, v in ranks[0]["measured"].items() if k[:4] == "net."})
    with torch.no_grad():
        errors = (net(x[:8]) - y[:8]).abs()
    for hook in ("validation epoch", "validation", "epoch", "end"):
        assert read[hook]["synced"] == pytest.approx(errors.mean().item(), rel=1e-5)
        assert read[hook]["metric"] == pytest.approx(errors.mean().item(), rel=1e-5)
        assert read[hook]["alone"] == pytest.approx(errors[:5].mean().item(), rel=1e-5)
    assert "train_loss_step" in read["batch"]
    assert read["epoch"]["train_loss"] == read["end"]["train_loss"]
    assert read["end"]["train_loss"] == ranks[1]["read"]["end"]["train_loss"]
    assert read["end"]["train_loss"] != read["end"]["train_loss_step"]
    # Values that hooks log are means over the ranks.
    assert read["validation"]["validation hook"] == read["end"]["hook"] == 0.5
    assert [rank["stopped"] for rank in ranks] == [2, 2]
    assert read["end"]["first only"] == 5.0
    assert "first only" not in ranks[1]["read"]["end"]


@pytest.mark.integration
def test_collectives(ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        assert found["collectives"] == {
            "mean": [1.5, 2.0],
            "sum": [3.0, 4.0],
            "max": 1,
            "gathered": [[1.0, 2.0], [2.0, 2.0]],
            "flags": [[True], [False]],
            "told": {"from": 1},
            "any": True,
            "all": False,
        }
        # Both ranks received rank 0's row, so the gradients of both are summed on rank 0.
        assert found["gradient"][0] == (2.0 if rank == 0 else 0.0)
