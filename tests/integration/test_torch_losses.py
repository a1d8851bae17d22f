"""All losses of torch.nn with their options: 2 ranks with unequal batches match one process."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch.collectives import current, session
from hvd_estimators.torch.gradients import GradientAverager
from hvd_estimators.torch.loss_weights import StepBatches
from hvd_estimators.torch.metrics import MetricSums
from hvd_estimators.torch.objective import Objective
from hvd_estimators.torch.tensors import TensorSpec

pytestmark = pytest.mark.integration

CLASSES, WIDTH, DEVICE = 4, 3, torch.device("cpu")
# Rows of each rank's micro-batches: two steps of two micro-batches each.
ROWS = (((3, 2), (2, 1)), ((2, 0), (1, 0)))
TOTAL = 11


@dataclass(frozen=True)
class Case:
    """Loss, and its outputs and labels.

    Attributes
    ----------
    loss : callable
        ``loss(output, label)``.
    shape : tuple of int
        Shape of each row of the output.
    label : callable
        Makes the labels, given a generator and the number of rows.
    activation : callable
        Applied to the output.
    """

    loss: Any
    label: Callable[[np.random.Generator, int], np.ndarray]
    shape: tuple[int, ...] = (WIDTH,)
    activation: Callable[[Any], Any] = field(default=lambda output: output)


def floats(*shape: int) -> Any:
    return lambda rng, rows: rng.uniform(0.1, 0.9, (rows, *shape)).astype(np.float32)


def signs(*shape: int) -> Any:
    return lambda rng, rows: rng.choice([-1.0, 1.0], (rows, *shape)).astype(np.float32)


def probabilities(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.dirichlet(np.ones(CLASSES), rows).astype(np.float32)


def classes(*shape: int, ignored: int | None = None) -> Any:
    def make(rng: np.random.Generator, rows: int) -> np.ndarray:
        found = rng.integers(0, CLASSES, (rows, *shape))
        if ignored is not None:
            # More in the first rows, so that ranks differ; rank 1's only rows of a step have none.
            chance = np.linspace(0.8, 0.1, rows).reshape(rows, *[1] * len(shape))
            found = np.where(rng.random((rows, *shape)) < chance, ignored, found)
        return found

    return make


def log_softmax(output: torch.Tensor) -> torch.Tensor:
    return output.log_softmax(dim=1)


CLASS_WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5])


def by_classes(kind: type[torch.nn.Module]) -> Iterator[Case]:
    """Yield losses of class indices."""
    activation = log_softmax if kind is not torch.nn.CrossEntropyLoss else lambda output: output
    smoothing = [0.0, 0.2] if kind is torch.nn.CrossEntropyLoss else [0.0]
    shapes = [(2, 2)] if kind is torch.nn.NLLLoss2d else [(), (5,), (2, 2)]
    for shape, weight, ignored, smooth, reduction in itertools.product(
        shapes, [None, CLASS_WEIGHT], [None, -100, 1], smoothing, ["mean", "sum"]
    ):
        options: dict[str, Any] = {"weight": weight, "reduction": reduction}
        if ignored is not None and ignored != -100:
            options["ignore_index"] = ignored
        if smooth:
            options["label_smoothing"] = smooth
        labels = classes(*shape, ignored=ignored)
        yield Case(kind(**options), labels, (CLASSES, *shape), activation)


def each(kind: type[torch.nn.Module], label: Any, **options: Any) -> Iterator[Case]:
    """Yield a loss with each value of each option alone, as a mean and as a sum."""
    shape = options.pop("shape", (WIDTH,))
    activation = options.pop("activation", lambda output: output)
    variants = [{}, *({name: value} for name, values in options.items() for value in values)]
    for variant in variants:
        yield Case(kind(**variant), label, shape, activation)
    yield Case(kind(reduction="sum"), label, shape, activation)


class TakesParts(torch.nn.Module):
    """Custom loss that passes the parts of an output to a loss of torch."""

    def __init__(self, loss: Any, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.loss = loss
        self.call = call
        self.reduction = getattr(loss, "reduction", "mean")

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.call(self.loss, output, label)


def of_parts(
    kind: type[torch.nn.Module], call: Any, label: Any, shape: tuple[int, ...], *options: Any
) -> Iterator[Case]:
    for variant in ({}, {"reduction": "sum"}, *options):
        yield Case(TakesParts(kind(**variant), call), label, shape)


def ctc(loss: Any, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    rows = len(output)
    lengths = torch.full((rows,), 6), torch.full((rows,), label.shape[1])
    return loss(output.permute(2, 0, 1).log_softmax(dim=2), label.long() % 3 + 1, *lengths)


def adaptive() -> Iterator[Case]:
    torch.manual_seed(3)
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, cutoffs=[2])
    yield Case(lambda output, label: module(output, label).loss, classes())


def linear_cross_entropy() -> Iterator[Case]:
    for variant in (
        {},
        {"weight": CLASS_WEIGHT},
        {"ignore_index": 1},
        {"weight": CLASS_WEIGHT, "ignore_index": 1, "label_smoothing": 0.2},
        {"reduction": "sum", "ignore_index": 1},
    ):
        torch.manual_seed(3)
        loss = torch.nn.LinearCrossEntropyLoss(WIDTH, CLASSES, **variant)
        yield Case(loss, classes(ignored=1 if "ignore_index" in variant else None))


nn = torch.nn
pair = lambda loss, o, y: loss(o[:, :2], o[:, 2:4], y.reshape(-1))  # noqa: E731
scalars = lambda loss, o, y: loss(o[:, 0], o[:, 1], y.reshape(-1))  # noqa: E731
triple = lambda loss, o, y: loss(o[:, :2], o[:, 2:4], y)  # noqa: E731
PER_CLASS = torch.tensor([0.5, 2.0, 1.0])

CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "L1Loss": lambda: each(nn.L1Loss, floats(WIDTH)),
    "MSELoss": lambda: each(nn.MSELoss, floats(WIDTH)),
    "SmoothL1Loss": lambda: each(nn.SmoothL1Loss, floats(WIDTH), beta=[0.1]),
    "HuberLoss": lambda: each(nn.HuberLoss, floats(WIDTH), delta=[0.1]),
    "PoissonNLLLoss": lambda: each(nn.PoissonNLLLoss, floats(WIDTH), log_input=[True], full=[True]),
    "KLDivLoss": lambda: each(
        nn.KLDivLoss,
        probabilities,
        shape=(CLASSES,),
        activation=log_softmax,
        reduction=["batchmean", "mean"],
        log_target=[True],
    ),
    "SoftMarginLoss": lambda: each(nn.SoftMarginLoss, signs(WIDTH)),
    "HingeEmbeddingLoss": lambda: each(nn.HingeEmbeddingLoss, signs(WIDTH), margin=[0.3]),
    "BCELoss": lambda: each(
        nn.BCELoss, floats(WIDTH), weight=[PER_CLASS], activation=torch.sigmoid
    ),
    "BCEWithLogitsLoss": lambda: each(
        nn.BCEWithLogitsLoss, floats(WIDTH), weight=[PER_CLASS], pos_weight=[PER_CLASS]
    ),
    "MultiLabelSoftMarginLoss": lambda: each(
        nn.MultiLabelSoftMarginLoss, floats(WIDTH), weight=[PER_CLASS]
    ),
    "MultiLabelMarginLoss": lambda: each(
        nn.MultiLabelMarginLoss, classes(CLASSES), shape=(CLASSES,)
    ),
    "MultiMarginLoss": lambda: each(
        nn.MultiMarginLoss, classes(), shape=(CLASSES,), weight=[CLASS_WEIGHT], p=[2], margin=[0.5]
    ),
    "CrossEntropyLoss": lambda: itertools.chain(
        by_classes(nn.CrossEntropyLoss),
        each(
            nn.CrossEntropyLoss,
            probabilities,
            shape=(CLASSES,),
            weight=[CLASS_WEIGHT],
            label_smoothing=[0.1],
        ),
    ),
    "NLLLoss": lambda: by_classes(nn.NLLLoss),
    "NLLLoss2d": lambda: by_classes(nn.NLLLoss2d),
    "LinearCrossEntropyLoss": linear_cross_entropy,
    "AdaptiveLogSoftmaxWithLoss": adaptive,
    "GaussianNLLLoss": lambda: of_parts(
        nn.GaussianNLLLoss,
        lambda loss, o, y: loss(o[:, :2], y, o[:, 2:4].exp()),
        floats(2),
        (4,),
        {"full": True},
    ),
    "CosineEmbeddingLoss": lambda: of_parts(
        nn.CosineEmbeddingLoss, pair, signs(1), (4,), {"margin": 0.2}
    ),
    "MarginRankingLoss": lambda: of_parts(
        nn.MarginRankingLoss, scalars, signs(1), (2,), {"margin": 0.2}
    ),
    "TripletMarginLoss": lambda: of_parts(
        nn.TripletMarginLoss, triple, floats(2), (4,), {"margin": 0.5, "p": 1, "swap": True}
    ),
    "TripletMarginWithDistanceLoss": lambda: of_parts(
        nn.TripletMarginWithDistanceLoss, triple, floats(2), (4,), {"margin": 0.5}
    ),
    "CTCLoss": lambda: of_parts(nn.CTCLoss, ctc, classes(2), (CLASSES, 6), {"zero_infinity": True}),
}


class Net(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = torch.nn.Linear(WIDTH, int(np.prod(case.shape)))
        self.case = case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.case.activation(self.linear(x).reshape(len(x), *self.case.shape))


def columns_of(case: Case) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(11)
    return {
        "x": torch.from_numpy(rng.normal(size=(TOTAL, WIDTH)).astype(np.float32)),
        "y": torch.from_numpy(case.label(rng, TOTAL)),
        "w": torch.from_numpy(rng.uniform(0.2, 3.0, TOTAL).astype(np.float32)),
    }


def step_of_one_process(case: Case, columns: Any, net: torch.nn.Module, weighted: bool) -> Any:
    """Return the loss of a global batch in plain torch."""
    output, label = net(columns["x"]), columns["y"]
    if not weighted:
        return case.loss(output, label)
    # The numerator of sample weights over the denominator without them.
    loss = copy.copy(case.loss)
    whole, loss.reduction = case.loss(output, label), "none"
    elements = loss(output, label).reshape(len(label), -1).sum(dim=1)
    denominator = (elements.sum() / whole).detach()
    return (elements * columns["w"]).sum() / denominator


def trained(case: Case, weighted: bool) -> tuple[list[np.ndarray], list[np.ndarray], Any, Any]:
    """Train two steps on this rank and alone; return the weights and the losses of both."""
    columns, net, alone = columns_of(case), Net(case), Net(case)
    starts = iter(np.cumsum([0, *(n for step in range(2) for r in ROWS for n in r[step])]))
    places = {
        (step, rank, number): slice(start, start + rows)
        for (step, rank, number, rows), start in zip(
            ((s, r, n, ROWS[r][s][n]) for s in range(2) for r in range(2) for n in range(2)),
            starts,
            strict=False,
        )
    }
    rank = current().rank
    own = [
        {name: c[places[step, rank, number]] for name, c in columns.items()}
        for step in range(2)
        for number in range(2)
    ]
    dtype = str(columns["y"].dtype).removeprefix("torch.")
    spec = TensorSpec(("x",), ("y",), "w" if weighted else None, dtypes={"y": dtype})
    objective = Objective(spec, (case.loss,), None, (1.0,), (), None).on_rank(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averager = GradientAverager(net, [optimizer])
    sizes = [sum(ROWS[r][step][number] for r in range(2)) for step in range(2) for number in (0, 1)]
    batches = StepBatches(iter(own), iter(sizes), float)
    measures = MetricSums(objective.metrics, objective.loss_parts)
    for _ in range(2):
        window, rows = batches.next_step(2)
        totals = objective.totals(window)
        for number, batch in enumerate(window):
            tensors = spec.batch(batch)
            averager.weights.start(
                tensors.rows, rows, 2, ranks=2, totals=totals, is_last=number == 1
            )
            with averager.averaging(accumulate=number == 0):
                if not tensors.rows:
                    averager.weights.without_rows()
                else:
                    evaluation = objective.evaluate(net, tensors, averager.weights)
                    (evaluation.step_loss / 2).backward()
                    measures.add(evaluation)
        optimizer.step()
        optimizer.zero_grad()
    averager.remove()
    expected = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        rows = [places[step, r, n] for r in range(2) for n in range(2)]
        batch = {name: torch.cat([c[part] for part in rows]) for name, c in columns.items()}
        expected.zero_grad()
        step_of_one_process(case, batch, alone, weighted).backward()
        expected.step()
    with torch.no_grad():
        # Evaluated with constant weights: those after training.
        final = MetricSums(objective.metrics, objective.loss_parts)
        for batch in own:
            if len(batch["x"]):
                final.add(objective.evaluate(net, spec.batch(batch)))
        reference = step_of_one_process(case, columns, net, weighted)
    return (
        [p.detach().numpy() for p in net.parameters()],
        [p.detach().numpy() for p in alone.parameters()],
        final.reduced("final")["loss"],
        float(reference),
    )


def weightable(case: Case) -> bool:
    return isinstance(case.loss, torch.nn.Module) and not isinstance(case.loss, TakesParts)


def run_all(variants: list[tuple[str, int, Case, bool]]) -> list[str]:
    """Return the differences of all variants, in one launch."""
    wrong = []
    with session("horovod"):
        for name, number, case, weighted in variants:
            found, expected, loss, reference = trained(case, weighted)
            label = f"{name}[{number}]{' with sample weights' if weighted else ''}: {case.loss}"
            pairs = zip(found, expected, strict=True)
            if not all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs):
                wrong.append(label)
            if not np.isclose(loss, reference, rtol=1e-5, equal_nan=True):
                wrong.append(f"{label} measured {loss}, not {reference}")
    return wrong


def test_all_losses_of_torch_match_one_process() -> None:
    names = {
        name
        for name in dir(nn)
        if name.endswith(("Loss", "Loss2d")) or name == "AdaptiveLogSoftmaxWithLoss"
    }
    assert names == set(CASES), "a loss of torch.nn has no case here"
    variants = [
        (name, number, case, weighted)
        for name, make in CASES.items()
        for number, case in enumerate(make())
        for weighted in (False, True)
        if not weighted or weightable(case)
    ]
    functions = [
        (functional.cross_entropy, classes(5, ignored=-100), lambda output: output),
        (
            functools.partial(functional.cross_entropy, weight=CLASS_WEIGHT, ignore_index=1),
            classes(5, ignored=1),
            lambda output: output,
        ),
        (
            functools.partial(functional.nll_loss, reduction="sum"),
            classes(5, ignored=-100),
            log_softmax,
        ),
    ]
    variants += [
        ("function", number, Case(loss, label, (CLASSES, 5), activation), False)
        for number, (loss, label, activation) in enumerate(functions)
    ]
    for wrong in LocalBackend(2).run(run_all, (variants,)):
        assert wrong == []
