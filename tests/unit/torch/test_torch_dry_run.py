"""Dry runs report mismatches before training, without side effects."""

import numpy as np
import pytest
import torch
import torchmetrics
from objectives import objective_of

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.torch.dry_run import check_fit, output_shapes
from hvd_estimators.torch.tensors import TensorSpec

F = torch.nn.functional
ROWS = 3
COLUMNS = {
    "x": np.ones((ROWS, 4), np.float32),
    "y": np.ones(ROWS),
    "wide": np.ones((ROWS, 2)),
    "w": np.ones(ROWS),
}
SPEC = TensorSpec(("x",), ("y",))


class TwoOutputs(torch.nn.Module):
    def forward(self, x):
        return x.sum(dim=1), x.reshape(-1, 2, 2)


def fit(module, loss=F.mse_loss, spec=SPEC):
    losses = [] if loss is None else [loss] * len(spec.label_cols)
    return check_fit(module, objective_of(spec, *losses), COLUMNS)


def test_the_dry_run_returns_the_shape_of_one_row_per_output():
    assert fit(torch.nn.Linear(4, 1)) == [(1,)]
    assert fit(torch.nn.Linear(4, 7), loss=None) == [(7,)]
    assert fit(TwoOutputs(), None, TensorSpec(("x",), ("y", "wide"))) == [(), (2, 2)]
    assert output_shapes(TwoOutputs(), SPEC, [torch.zeros(5, 4)]) == [(), (2, 2)]


def test_metrics_are_tried_on_copies():
    seen = []

    def counted(output, label):
        seen.append(output)
        return (output - label).mean()

    of_class = torchmetrics.MeanSquaredError()
    module = torch.nn.Linear(4, 1)
    metrics = (counted, of_class, lambda o, _: o[:1, 0])
    check_fit(module, objective_of(SPEC, metrics=metrics), COLUMNS)
    assert (seen, of_class.update_count) == ([], 0)


def test_errors_of_metrics_name_the_metric_and_the_line():
    def per_column(output, label):
        return (output - label).square().flatten()

    def undefined(output, label):
        return missing_name  # noqa: F821

    def of_two_classes(output, label):
        raise ValueError("only one class present")

    def tried(metric):
        check_fit(torch.nn.Linear(4, 1), objective_of(SPEC, metrics=(metric,)), COLUMNS)

    with pytest.raises(ParamError, match=r"^metrics: per_column must return one .* shape \(3,\)"):
        tried(per_column)
    where = r"NameError: name 'missing_name' .*\(.*test_torch_dry_run.py:\d+, in undefined\)"
    with pytest.raises(ShapeError, match=rf"^metrics: undefined failed .*{where}"):
        tried(undefined)
    with pytest.raises(ShapeError, match=r"^metrics: Broken failed"):
        tried(Broken())
    tried(of_two_classes)


class Broken(torchmetrics.MeanSquaredError):
    def update(self, preds, target):
        raise TypeError("2 outputs expected")


def test_labels_that_only_broadcast_to_the_output_are_rejected():
    """Torch only warns, and trains on the mean of the labels."""
    with pytest.raises(ShapeError, match="The loss cannot take"):
        fit(torch.nn.Linear(4, 2), F.mse_loss, TensorSpec(("x",), ("y",), label_shapes=((-1, 1),)))


def test_batch_normalization_is_checked_with_a_single_row():
    columns = {name: array[:1] for name, array in COLUMNS.items()}
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).train()

    assert check_fit(module, objective_of(SPEC, F.mse_loss), columns) == [(1,)]


def test_sum_losses_are_rejected_and_losses_over_the_batch_warned_about(caplog):
    module = torch.nn.Linear(4, 1)
    columns = {**COLUMNS, "x": np.arange(12, dtype=np.float32).reshape(3, 4)}

    def total(output, label):
        return ((output - label) ** 2).sum()

    def spread(output, label):
        return (output - label).abs().max()

    def stated(output, label):
        return {"loss": (output - label).abs().sum() / 7, "denominator": 7}

    with pytest.raises(ParamError, match="expected a mean over rows for label 'y', found a sum"):
        check_fit(module, objective_of(SPEC, total), columns)
    for loss in (F.mse_loss, torch.nn.MSELoss(reduction="sum"), stated):
        check_fit(module, objective_of(SPEC, loss), columns)
    assert caplog.records == []
    check_fit(module, objective_of(SPEC, spread), columns)
    assert "do not train as one process" in caplog.text


class Summing(torch.nn.Module):
    """Model that returns the sum of its losses in training."""

    def __init__(self, total=True):
        super().__init__()
        self.last = torch.nn.Linear(4, 1)
        self.total = total

    def forward(self, x, y):
        if not self.training:
            return self.last(x)
        losses = (self.last(x)[:, 0] - y).square()
        return {"loss": losses.sum() if self.total else losses.mean()}


class JointSum(torch.nn.Module):
    reduction = "mean"

    def forward(self, outputs, labels):
        return (outputs[:, 0] - labels[0]).square().sum()


class MarkedSum(JointSum):
    reduction = "sum"


@pytest.mark.parametrize("returned", [False, True])
def test_joint_losses_that_sum_over_the_batch_are_rejected(returned, caplog):
    generator = np.random.default_rng(3)
    columns = {"x": generator.normal(size=(ROWS, 4)).astype("f"), "y": generator.normal(size=ROWS)}

    def check(total):
        if returned:
            spec = TensorSpec(("x", "y"), (), pairs=False)
            objective = objective_of(spec, lambda outputs: outputs["loss"], joint=True)
            return check_fit(Summing(total), objective, columns, validates=False)
        loss = JointSum() if total else lambda outputs, labels: F.mse_loss(outputs[:, 0], labels[0])
        return check_fit(torch.nn.Linear(4, 1), objective_of(SPEC, loss, joint=True), columns)

    with pytest.raises(
        ParamError, match="expected a mean over rows for the joint loss, found a su"
    ):
        check(True)
    check(False)
    check_fit(torch.nn.Linear(4, 1), objective_of(SPEC, MarkedSum(), joint=True), columns)
    assert caplog.records == []


def test_a_loss_that_changes_from_call_to_call_is_not_called_a_mean_of_something_else(caplog):
    net, columns = torch.nn.Linear(4, 1), {**COLUMNS, "y": np.arange(ROWS, dtype=float)}
    calls = [0]

    def growing(output, label):
        calls[0] += 1
        return (output - label).square().mean() * calls[0]

    def noisy(output, label):
        return (output + torch.rand_like(output) - label).square().mean()

    for loss in (growing, noisy):
        check_fit(net, objective_of(SPEC, loss), columns)
    assert (caplog.text, calls) == ("", [0])
