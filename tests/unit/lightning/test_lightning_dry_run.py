"""Checks on the driver before any rank starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from torch.nn import functional

from hvd_estimators.exceptions import DataError, ParamError, ShapeError
from hvd_estimators.lightning.dry_run import check_loss, row_shapes, try_step
from hvd_estimators.lightning.loaders import BatchForm, TrainLoader
from hvd_estimators.lightning.trainer_args import check_callbacks
from hvd_estimators.torch.tensors import TensorSpec
from hvd_estimators.training.shard_state import ShardStates


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch["x"]).mean()


def parts_of(batch: dict[str, torch.Tensor]) -> Callable[[slice], Any]:
    return lambda rows: {name: tensor[rows] for name, tensor in batch.items()}


def test_errors_in_a_step_describe_the_batch() -> None:
    try_step(Plain(), 3, parts_of({"x": torch.zeros(3, 2)}))
    with pytest.raises(ShapeError, match=r"batch of y \(3, 2\) float32 with KeyError: 'x'"):
        try_step(Plain(), 3, parts_of({"y": torch.zeros(3, 2)}))
    with pytest.raises(ShapeError, match="column_dtypes"):
        try_step(Plain(), 3, parts_of({"x": torch.zeros(3, 2, dtype=torch.float64)}))


class Returning(Plain):
    """Module with a dropout that returns the loss of a function of outputs and labels."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = torch.nn.functional.dropout(self(batch["x"]), 0.5, self.training)
        loss = self.loss(output, batch["y"])
        self.log("train_loss", loss["loss"] if isinstance(loss, dict) else loss)
        return loss


def test_a_dict_without_a_loss_is_an_error() -> None:
    batch = {"x": torch.zeros(3, 2), "y": torch.zeros(3, 3)}
    returning = Returning(lambda output, y: {"Loss": output.mean(), "loss": output.mean()})
    try_step(returning, 3, parts_of(batch))

    class Misspelled(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"Loss": self(batch["x"]).mean()}

    with pytest.raises(ParamError, match=r"^model: .* found the keys 'Loss'"):
        try_step(Misspelled(), 3, parts_of(batch))
    manual = Misspelled()
    manual.automatic_optimization = False
    try_step(manual, 3, parts_of(batch))


CLASS_WEIGHT = torch.tensor([0.1, 1.0, 9.0])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (functional.cross_entropy, "mean"),
        (lambda o, y: functional.cross_entropy(o + 0.01 * torch.randn_like(o), y), "mean"),
        (lambda o, y: {"loss": functional.cross_entropy(o, y)}, "mean"),
        (lambda o, y: functional.cross_entropy(o, y, reduction="sum"), "sum"),
        (lambda o, y: {"loss": o.square().sum() / 7}, "sum"),
        # Values of a loss that draws random numbers tell nothing: a fit is not rejected by chance.
        (lambda o, y: {"loss": (o + 0.01 * torch.randn_like(o)).square().sum() / 7}, "mean"),
        (lambda o, y: functional.cross_entropy(o, y, CLASS_WEIGHT), "other"),
        (
            lambda o, y: {
                "loss": functional.cross_entropy(o, y, CLASS_WEIGHT),
                "denominator": CLASS_WEIGHT[y].sum(),
            },
            "mean",
        ),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_is_found_before_training(
    loss: Any, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = {"x": torch.randn(7, 2), "y": torch.tensor([0, 0, 0, 2, 1, 2, 1])}
    found = try_step(Returning(loss), 7, parts_of(batch)).loss_of_halves
    assert found == expected
    with caplog.at_level("WARNING"):
        if found == "sum":
            with pytest.raises(ParamError, match=r"^model: expected .* found a sum.* Divide"):
                check_loss(found)
        else:
            check_loss(found)
    assert ("'denominator'" in caplog.text) is (expected == "other")


@pytest.mark.parametrize("precision", ["64-true", 64, "bf16-true", "16-true", "bf16-mixed"])
def test_a_step_is_tried_in_the_precision_of_the_trainer(precision: Any) -> None:
    class Checked(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if precision != "bf16-mixed":
                dtype = torch.float64 if "64" in str(precision) else torch.bfloat16
                dtype = torch.float16 if precision == "16-true" else dtype
                assert self.linear.weight.dtype == batch["x"].dtype == torch.ones(1).dtype == dtype
            return super().training_step(batch, batch_idx)

    module, batch = Checked(), {"x": torch.zeros(3, 2, dtype=torch.float64)}
    if precision == "bf16-mixed":
        batch = {"x": torch.zeros(3, 2, dtype=torch.bfloat16)}
    tried = try_step(module, 3, parts_of(batch), trainer_args={"precision": precision})
    assert tried.takes_one_row is True
    assert module.linear.weight.dtype == torch.ones(1).dtype == torch.float32
    plugins = [Trainer(precision=precision, accelerator="cpu", logger=False).precision_plugin]
    tried = try_step(module, 3, parts_of(batch), trainer_args={"plugins": plugins})
    assert tried.takes_one_row is True


@pytest.mark.parametrize(
    ("finder", "param"),
    [(LearningRateFinder, "the optimizer's rate"), (BatchSizeFinder, "batch_size")],
)
def test_callbacks_that_search_for_a_value_are_rejected(finder: Any, param: str) -> None:
    with pytest.raises(ParamError, match=rf"^callbacks: .*{finder.__name__}.* set {param}\."):
        check_callbacks("callbacks", [finder()])


def test_modules_with_batch_normalization_cannot_train_on_one_row() -> None:
    class Normalizing(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Sequential(self.linear, torch.nn.BatchNorm1d(3))

    for module, takes_one in ((Plain(), True), (Normalizing(), False)):
        assert try_step(module, 3, parts_of({"x": torch.zeros(3, 2)})).takes_one_row is takes_one


@pytest.mark.parametrize(
    ("take", "batch"),
    [
        (lambda batch: torch.nn.functional.mse_loss(*_unpacked(batch)), {"x": 2, "y": 1}),
        (lambda batch: _unpacked(batch), {"x": 2, "y": 1, "w": 1}),
        (lambda batch: batch[0].mean(), {"x": 2, "y": 1}),
        (lambda batch: _unpacked(batch)[0].view(-1), {"x": 2, "y": 1}),
    ],
)
def test_errors_in_steps_that_unpack_the_batch_suggest_a_line(
    take: Any, batch: dict[str, int]
) -> None:
    class Unpacks(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return take(batch)

    columns = {name: torch.zeros(3, width) for name, width in batch.items()}
    with pytest.raises(ShapeError) as raised:
        try_step(Unpacks(), 3, parts_of(columns))
    assert "The batch is a dict of column name to tensor" in str(raised.value)


def _unpacked(batch: Any) -> Any:
    x, y = batch
    return x, y


def test_checks_do_not_change_the_module_or_the_random_state() -> None:
    module = Plain()
    before = module.linear.weight.clone()
    state = torch.get_rng_state()
    try_step(module, 3, parts_of({"x": torch.zeros(3, 2)}))
    assert row_shapes(module, [torch.zeros(3, 2)], TensorSpec(("x",), ())) == [(3,)]
    assert row_shapes(module, [torch.zeros(3, 5)], TensorSpec(("x",), ())) is None
    assert torch.equal(module.linear.weight, before)
    assert torch.equal(torch.get_rng_state(), state)


class Batches:
    """Windows of batches of 4, 1 and 2 rows, and one without rows, of which another rank has 3."""

    def __init__(self) -> None:
        self.rows = iter([4, 1, 2, 0, 0])

    def next_step(self, count: int) -> tuple[list[Any], float]:
        sizes = [next(self.rows) for _ in range(count)]
        return [{"x": torch.arange(size)} for size in sizes], float(sum(sizes) + 3)


def test_batches_have_their_form_and_the_rows_of_their_step() -> None:
    batches: Any = Batches()
    loader = TrainLoader(
        batches, BatchForm({"x": "float64"}, {"x": (-1, 1)}), 3, lambda: 2, ShardStates(1, 0, 1)
    )
    taken = [(batch["x"], loader.rows, loader.step_rows) for batch in loader]
    assert [(*x.shape, rows, of_step) for x, rows, of_step in taken] == [
        *((4, 1, 4, 8), (1, 1, 1, 8), (2, 1, 2, 5))
    ]
    assert loader.passes == 2
    assert all(x.dtype == torch.float64 for x, _, _ in taken)
    with pytest.raises(DataError, match="data_module: a batch has no rows"):
        next(iter(loader))
