"""Losses and metrics of an epoch, and weights of batches, in a job of one rank."""

import itertools

import numpy as np
import pytest
import torch

from hvd_estimators.loading.readers import DataModule
from hvd_estimators.torch.collectives import session
from hvd_estimators.torch.loss import Evaluation
from hvd_estimators.torch.loss_weights import StepBatches, StepWeights, WeightedLoss, rows_of
from hvd_estimators.torch.metrics import Metrics, MetricSums


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with session("horovod"):
        yield


def mae(output, label):
    return (output - label).abs().mean()


def bias(output, label):
    return (output - label).mean().item()  # metrics may return plain numbers


def batches(rng, sizes=(4, 1, 3)):
    return [(rng.normal(size=n), rng.normal(size=n), rng.uniform(size=n)) for n in sizes]


def add(measures, *pairs, loss):
    measures.add(
        Evaluation(
            torch.tensor(loss),
            [torch.tensor(output) for output, _ in pairs],
            [torch.tensor(label) for _, label in pairs],
            rows=len(pairs[0][1]),
        )
    )


def test_means_are_over_rows_not_batches():
    measures = MetricSums(Metrics([[mae], [bias]], ["y"]))
    data = batches(np.random.default_rng(0))

    for output, label, _ in data:
        loss = ((output - label) ** 2).mean()
        add(measures, (output, label), loss=loss)

    difference = np.concatenate([output - label for output, label, _ in data])
    expected = {
        "loss": (difference**2).mean(),
        "mae": np.abs(difference).mean(),
        "bias": difference.mean(),
    }
    assert measures.means() == pytest.approx(expected)
    assert measures.reduced("test") == pytest.approx(expected)


def test_a_single_metric_measures_every_label_and_longer_groups_pair_up():
    measures = MetricSums(Metrics([[mae], [mae, bias]], ["a", "b"]))
    zeros = np.zeros(2)

    add(measures, (zeros, zeros + 1), (zeros, zeros + 3), loss=0.5)

    means = measures.means()
    assert means == {"loss": 0.5, "a_mae": 1.0, "b_mae": 3.0, "a_mae_2": 1.0, "b_bias": -3.0}
    assert measures.as_record(means) == {
        "loss": 0.5,
        "all_metrics": [{"a_mae": 1.0, "b_mae": 3.0}, {"a_mae_2": 1.0, "b_bias": -3.0}],
    }


def test_sums_of_many_batches_do_not_lose_precision():
    measures = MetricSums(Metrics([], ["y"]))

    add(measures, (np.zeros(1), np.zeros(1)), loss=np.float32(2**24))
    for _ in range(1024):
        add(measures, (np.zeros(1), np.zeros(1)), loss=np.float32(3))

    # In 32 bits, adding 3 to 2**24 adds 4.
    expected = (2**24 + 3 * 1024) / 1025
    assert measures.means()["loss"] == pytest.approx(expected, rel=1e-12)


class Batches(DataModule):
    """Data module with given batches and given sizes over all ranks."""

    def __init__(self, columns, global_sizes):
        super().__init__(train_dir="", val_dir=None)
        self.columns, self.global_sizes = columns, global_sizes

    def train_data(self):
        return itertools.cycle(self.columns)

    def val_data(self):
        return iter(())

    def global_train_sizes(self):
        return None if self.global_sizes is None else itertools.cycle(self.global_sizes)


def columns(sizes):
    return [{"x": np.zeros(n)} for n in sizes]


def factors(data, count, size=1, passes_per_step=1, sum_over_ranks=float):
    batches = StepBatches(data.train_data(), data.global_train_sizes(), sum_over_ranks)
    weights, steps = StepWeights(), []
    while sum(map(len, steps)) < count:
        step, rows = batches.next_step(passes_per_step)
        steps.append([])
        for batch in step:
            weights.start(rows_of(batch), rows, passes_per_step, ranks=size)
            steps[-1] += weights.of_call([WeightedLoss(torch.zeros(()), rows_of(batch))])
    return steps


def test_ranks_sum_their_rows_only_if_the_data_module_has_no_sizes():
    asked = []

    def sum_over_ranks(rows):
        asked.append(rows)
        return 10.0

    told = factors(Batches(columns([4]), [10]), 1, size=2, sum_over_ranks=sum_over_ranks)
    assert asked == []
    assert factors(Batches(columns([4]), None), 1, size=2, sum_over_ranks=sum_over_ranks) == told
    assert asked == [4.0]
    assert told == [[2 * 4 / 10]]
