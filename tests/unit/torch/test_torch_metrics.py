"""Names of metrics, and torchmetrics states merged over simulated ranks."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics import wrappers

from hvd_estimators.torch.loss import Evaluation
from hvd_estimators.torch.metrics import EpochMetricStates, Metrics, metric_states, restore_metrics

CLASSES = 4
# The batches of three ranks, one of which has no rows.
SIZES = ((7, 3, 1), (5,), ())


def my_mae(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean()


def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return my_mae(output, label)


class Squared:
    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output - label) ** 2).mean()


def collection(**options: Any) -> torchmetrics.MetricCollection:
    return torchmetrics.MetricCollection(
        [
            torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro"),
            torchmetrics.Precision("multiclass", num_classes=CLASSES, average="macro"),
        ],
        **options,
    )


@pytest.mark.parametrize(
    ("groups", "labels", "names"),
    [
        ([[my_mae]], ["y"], ["my_mae"]),
        ([[my_mae]], ["a", "b"], ["a_my_mae", "b_my_mae"]),
        ([[my_mae, Squared()]], ["a", "b"], ["a_my_mae", "b_Squared"]),
        # Names already in use, among them the loss's name.
        ([[my_mae], [my_mae], [loss]], ["y"], ["my_mae", "my_mae_2", "loss_2"]),
        ([[my_mae], [lambda a, b: a.mean()]], ["y"], ["my_mae", "metric_1"]),
        ([[functools.partial(functools.partial(my_mae))]], ["y"], ["my_mae"]),
        ([[torch.nn.functional.l1_loss], [torch.nn.L1Loss()]], ["y"], ["l1_loss", "L1Loss"]),
        ([[torchmetrics.MeanSquaredError()]], ["y"], ["MeanSquaredError"]),
        ([[collection()]], ["y"], ["MulticlassF1Score", "MulticlassPrecision"]),
        (
            [[my_mae, collection(prefix="of_")], [collection(prefix="of_")]],
            ["a", "b"],
            [
                "a_my_mae",
                "b_of_MulticlassF1Score",
                "b_of_MulticlassPrecision",
                "a_of_MulticlassF1Score",
                "a_of_MulticlassPrecision",
                "b_of_MulticlassF1Score_2",
                "b_of_MulticlassPrecision_2",
            ],
        ),
    ],
)
def test_metrics_are_named_after_their_function_or_class(
    groups: Any, labels: list[str], names: list[str]
) -> None:
    assert Metrics(groups, labels).names == names


def rows(rng: np.random.Generator, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs that correlate with their labels; labels are floats, as columns are."""
    label = torch.from_numpy(rng.integers(0, max(classes, 2), size)).float()
    if classes:
        output = torch.from_numpy(rng.normal(size=(size, classes))).float()
        output += torch.nn.functional.one_hot(label.long(), classes)
        return output.softmax(1), label
    return torch.sigmoid(label - 0.5 + torch.from_numpy(rng.normal(size=size)).float()), label


def batches(classes: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    rng = np.random.default_rng(3)
    return [[rows(rng, size, classes) for size in of_rank] for of_rank in SIZES]


class Largest(torchmetrics.Metric):
    """Metric with a state for each of torchmetrics' reductions and for a custom one."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("most", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("least", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("all", [], dist_reduce_fx="cat")
        self.add_state("parts", [], dist_reduce_fx=None)
        self.add_state("product", torch.tensor(1.0), dist_reduce_fx=lambda stacked: stacked.prod(0))

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.most = torch.maximum(self.most, output.max())
        self.least = torch.minimum(self.least, output.min())
        self.seen = self.seen + len(output)
        self.all.append(output)
        self.parts.append(label)
        self.product = self.product * (1 + output.mean())

    def compute(self) -> dict[str, torch.Tensor]:
        joined = torchmetrics.utilities.dim_zero_cat(self.all)
        return {
            "most": self.most,
            "least": self.least,
            "seen": self.seen,
            "sum": joined.sum(),
            "labels": torch.cat(self.parts).sum(),
            "product": self.product,
        }


METRICS = {
    "AUROC": (lambda: torchmetrics.AUROC("binary"), 0),
    "AUROC by bins": (lambda: torchmetrics.AUROC("binary", thresholds=20), 0),
    "AUROC of classes": (lambda: torchmetrics.AUROC("multiclass", num_classes=CLASSES), CLASSES),
    "F1": (lambda: torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro"), 4),
    "precision": (
        lambda: torchmetrics.Precision("multiclass", num_classes=CLASSES, average="macro"),
        CLASSES,
    ),
    "of each class": (
        lambda: torchmetrics.Recall("multiclass", num_classes=CLASSES, average=None),
        CLASSES,
    ),
    "confusion": (lambda: torchmetrics.ConfusionMatrix("multiclass", num_classes=CLASSES), 4),
    "collection": (collection, CLASSES),
    "by class": (
        lambda: wrappers.ClasswiseWrapper(
            torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average=None)
        ),
        CLASSES,
    ),
    "composed": (lambda: torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError(), 0),
    # Its states are not reduced, but combined in compute().
    "Pearson": (torchmetrics.PearsonCorrCoef, 0),
    "Spearman": (torchmetrics.SpearmanCorrCoef, 0),
    "all reductions": (Largest, 0),
}


def evaluation(output: torch.Tensor, label: torch.Tensor) -> Evaluation:
    return Evaluation(torch.zeros(()), [output], [label], len(label))


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("resumed", [False, True])
def test_merged_states_of_unequal_ranks_equal_one_process(name: str, resumed: bool) -> None:
    make, classes = METRICS[name]
    alone = make()
    metrics = Metrics([[make()]], ["y"])
    ranks = []
    for of_rank in batches(classes):
        states = EpochMetricStates(metrics)
        for index, (output, label) in enumerate(of_rank):
            if resumed and index == 2:
                captured, states = states.capture(), EpochMetricStates(metrics)
                states.restore(captured)
            states.update(evaluation(output, label))
            alone.update(output, label.long() if classes or "AUROC" in name else label)
        ranks.append(states.capture())
    if resumed:
        # One rank replaces the first and the last; another rank is new.
        lone = EpochMetricStates(metrics)
        lone.restore([*ranks[0], *ranks[2]])
        ranks = [lone.capture(), ranks[1], EpochMetricStates(metrics).capture()]
    parts = [part for rank in ranks for part in rank]
    (found,) = EpochMetricStates(metrics).values(parts).values()
    expected = alone.compute()
    if isinstance(expected, dict):
        assert found == pytest.approx({key: float(v) for key, v in expected.items()}, rel=1e-5)
    else:
        assert np.array(found) == pytest.approx(expected.numpy(), rel=1e-5)


def test_only_classification_metrics_get_integer_labels() -> None:
    seen = []

    class Noting(torchmetrics.MeanMetric):
        def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
            seen.append(label.dtype)

    states = EpochMetricStates(Metrics([[Noting()]], ["y"]))
    states.update(evaluation(torch.zeros(2), torch.zeros(2)))
    assert seen == [torch.float32]
    states = EpochMetricStates(Metrics([[torchmetrics.AUROC("binary")]], ["y"]))
    with pytest.raises(ValueError, match=r"BinaryAUROC takes class numbers .* found 0\.5"):
        states.update(evaluation(torch.zeros(2), torch.tensor([1.0, 0.5])))


def test_a_metric_that_cannot_resume_from_several_ranks_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def of(*rows: float) -> Any:
        metric = torchmetrics.PearsonCorrCoef()
        metric.update(torch.tensor(rows), torch.tensor(rows) ** 2)
        return metric

    states = [metric_states(of(1.0, 2.0, 4.0)), metric_states(of(-1.0, 0.5))]
    metric = torchmetrics.PearsonCorrCoef()
    restore_metrics(metric, states[:1])
    assert not caplog.records
    torch.testing.assert_close(metric.compute(), of(1.0, 2.0, 4.0).compute())
    restore_metrics(metric, states)
    assert "PearsonCorrCoef: its state " in caplog.text
    assert "lacks the rows of 1 processes" in caplog.text


class Measured(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squared = torchmetrics.MeanSquaredError()
        self.both = torchmetrics.MetricCollection(
            {"one": torchmetrics.MeanSquaredError(), "two": torchmetrics.MeanSquaredError()}
        )

    def measure(self, *batches: list[float]) -> Measured:
        for rows in batches:
            batch = torch.tensor(rows)
            self.squared(batch, batch * 0)
            self.both.update(batch, batch * 0)
        return self


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_states_of_several_ranks_resume_on_fewer(ranks: int) -> None:
    parts = [[[1.0, 4.0], [2.0]], [[9.0], [5.0, 6.0, 7.0]], [[-3.0, 0.5]]]
    states = [metric_states(Measured().measure(*batches)) for batches in parts]
    states = pickle.loads(pickle.dumps(states))
    for rank in range(ranks):
        found = Measured()
        restore_metrics(found, states[rank::ranks])
        expected = Measured().measure(*(rows for part in parts[rank::ranks] for rows in part))
        for module in (found, expected):
            module.measure([8.0, 10.0])
        torch.testing.assert_close(found.squared.compute(), expected.squared.compute())
        torch.testing.assert_close(found.both.compute(), expected.both.compute())
