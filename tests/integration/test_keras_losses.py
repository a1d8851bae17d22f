"""All losses of Keras with their options: 2 ranks with unequal batches train as one process."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.collectives import GradientAverager, sum_tensors
from hvd_estimators.keras.denominators import LossDenominators
from hvd_estimators.keras.gradients import distribute
from hvd_estimators.launch.local_backend import LocalBackend

pytestmark = pytest.mark.integration

STEPS, WIDTH, CLASSES, ROWS = 5, 3, 4, (4, 2)
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
# These losses compare rows of a batch, or divide sums over all of its rows.
OVER_THE_BATCH = {"Circle": {}, "Dice": {"axis": -1}, "Tversky": {"axis": -1}}


@dataclass(frozen=True)
class Case:
    """Loss and its arguments.

    Attributes
    ----------
    name : str
        The class in `keras.losses`.
    label : str
        The kind of labels.
    options : mapping
        Options of the loss.
    masked : bool
        Whether the output carries a mask of steps.
    weighted : bool
        Whether there are sample weights.
    """

    name: str
    label: str = "floats"
    options: dict[str, Any] = field(default_factory=dict)
    masked: bool = False
    weighted: bool = False

    def loss(self) -> Any:
        return getattr(keras.losses, self.name)(**self.options)


LABELS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "floats": lambda rng, rows: rng.uniform(0.1, 0.9, (rows, STEPS, CLASSES)),
    "signs": lambda rng, rows: rng.choice([-1.0, 1.0], (rows, STEPS, CLASSES)),
    "one_hot": lambda rng, rows: np.eye(CLASSES)[rng.integers(0, CLASSES, (rows, STEPS))],
    "classes": lambda rng, rows: rng.integers(0, CLASSES, (rows, STEPS)),
    "tokens": lambda rng, rows: rng.integers(1, CLASSES, (rows, 2)),
}

KINDS: dict[str, tuple[str, Sequence[dict[str, Any]]]] = {
    "MeanSquaredError": ("floats", ()),
    "MeanAbsoluteError": ("floats", ()),
    "MeanAbsolutePercentageError": ("floats", ()),
    "MeanSquaredLogarithmicError": ("floats", ()),
    "CosineSimilarity": ("floats", ()),
    "Huber": ("floats", [{"delta": 0.1}]),
    "LogCosh": ("floats", ()),
    "Hinge": ("signs", ()),
    "SquaredHinge": ("signs", ()),
    "CategoricalHinge": ("one_hot", ()),
    "KLDivergence": ("floats", ()),
    "Poisson": ("floats", ()),
    "BinaryCrossentropy": ("floats", [{"from_logits": True}, {"label_smoothing": 0.2}]),
    "BinaryFocalCrossentropy": ("floats", [{"apply_class_balancing": True}, {"gamma": 1.0}]),
    "CategoricalCrossentropy": ("one_hot", [{"from_logits": True}, {"label_smoothing": 0.2}]),
    "CategoricalFocalCrossentropy": ("one_hot", [{"gamma": 1.0}]),
    "CategoricalGeneralizedCrossEntropy": ("classes", [{"q": 0.3}]),
    "SparseCategoricalCrossentropy": (
        "classes",
        [{"ignore_class": 1}, {"ignore_class": 1, "from_logits": True}],
    ),
    "CTC": ("tokens", ()),
}


def cases() -> Iterator[Case]:
    for name, (label, options) in KINDS.items():
        yield Case(name, label)
        for further in options:
            yield Case(name, label, dict(further))
        yield Case(name, label, {"reduction": "sum"})
        if name != "CTC":  # Its loss is one number per row, so a mask of steps does not fit.
            yield Case(name, label, masked=True)
    for ignored, masked, weighted, reduction in itertools.product(
        [None, 1], [False, True], [False, True], REDUCTIONS
    ):
        options = {"reduction": reduction, "ignore_class": ignored}
        yield Case("SparseCategoricalCrossentropy", "classes", options, masked, weighted)
    for name, options in OVER_THE_BATCH.items():
        if options:
            yield Case(name, "floats", dict(options))


class PositiveLoss(keras.losses.Loss):
    """Custom loss that divides by the number of positive labels, and states so."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        positive = keras.ops.cast(y_true > 0, y_pred.dtype)
        errors = keras.ops.square(y_pred - y_true) * positive
        return keras.ops.divide_no_nan(keras.ops.sum(errors), keras.ops.sum(positive))

    def denominator(self, y_true: Any, y_pred: Any) -> Any:
        return y_true > 0


class Masked(keras.layers.Layer):
    """Layer that masks steps, as Embedding(mask_zero=True) does."""

    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.supports_masking = True
        self.mask = mask

    def call(self, inputs: Any) -> Any:
        return inputs

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return inputs[..., 0] > 0 if self.mask else None


def make_net(masked: bool, outputs: int = 1) -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((STEPS, WIDTH))
    hidden = Masked(masked)(inputs)
    found = [
        keras.layers.Dense(CLASSES, activation="softmax", name=f"out{n}")(hidden)
        for n in range(outputs)
    ]
    return keras.Model(inputs, found[0] if outputs == 1 else found)


def data_of(label: str, rows: int, seed: int = 3) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(0.3, 1.0, (rows, STEPS, WIDTH)).astype(np.float32)
    # Few steps of the first rank count.
    x[: ROWS[0], 1:, 0] = -1.0
    y = LABELS[label](rng, rows).astype(np.float32)
    if label == "classes":
        y[: ROWS[0], 1:] = 1
    return x, y, rng.uniform(0.2, 3.0, rows).astype(np.float32)


class Trained:
    """Model that trains on this rank's rows as the trainer makes it."""

    def __init__(self, loss: Any, masked: bool, outputs: int = 1, passes: int = 1) -> None:
        self.model = make_net(masked, outputs)
        averager = GradientAverager()
        optimizer = keras.optimizers.SGD(0.5)
        distribute(optimizer, averager, passes)
        self.model.compile(optimizer, loss, run_eagerly=True)
        self.denominators = LossDenominators(self.model, [averager], passes, 4, sum_tensors)
        self.steps = self.model.train_step, self.model.test_step

    def run(self, batches: Sequence[Any], is_training: bool) -> float:
        self.model.reset_metrics()
        for batch in batches:
            tensors = keras.tree.map_structure(tf.constant, batch)
            with self.denominators.in_step(tensors, is_training):
                self.steps[not is_training](tensors)
        return float(self.model.metrics[0].total), float(self.model.metrics[0].count)


def batch_of(label: str, weighted: bool, rows: slice, outputs: int = 1) -> Any:
    x, y, w = (array[rows] for array in data_of(label, sum(ROWS)))
    y = y if outputs == 1 else [y] * outputs
    return (x, y, w[:, None]) if weighted else (x, y)


def differing(case: Case) -> str | None:
    """Return the difference of a case from one process, or None."""
    import horovod.tensorflow as hvd

    own = slice(0, ROWS[0]) if hvd.rank() == 0 else slice(ROWS[0], None)
    trained = Trained(case.loss(), case.masked)
    trained.run([batch_of(case.label, case.weighted, own)], True)
    alone = make_net(case.masked)
    alone.compile(keras.optimizers.SGD(0.5), case.loss(), run_eagerly=True)
    whole = batch_of(case.label, case.weighted, slice(None))
    alone.train_on_batch(*whole)
    for a, b in zip(trained.model.trainable_variables, alone.trainable_variables, strict=True):
        if not np.allclose(a, b, rtol=1e-4, atol=1e-6):
            return f"{case}: {np.abs(a - b).max()}"
    # Split rank 1's rows into two batches.
    parts = [own] if hvd.rank() == 0 else [slice(ROWS[0], ROWS[0] + 1), slice(ROWS[0] + 1, None)]
    if case.options.get("reduction") == "sum":
        parts = [own]
    batches = [batch_of(case.label, case.weighted, part) for part in parts]
    sums = hvd.allreduce(tf.constant(trained.run(batches, False), tf.float64), op=hvd.Sum)
    expected = float(alone.compute_loss(*whole[:1], whole[1], alone(whole[0]), *whole[2:]))
    found = float(sums[0] / sums[1])
    return None if np.isclose(found, expected, rtol=1e-4) else f"{case}: {found} not {expected}"


def run_all(variants: Sequence[Case]) -> list[str]:
    import horovod.tensorflow as hvd

    hvd.init()
    found = [differing(case) for case in variants]
    return [*filter(None, [*found, *of_outputs(hvd), *of_passes(hvd), *twice(hvd), *stated(hvd)])]


def same(trained: Any, alone: Any, what: str) -> str | None:
    pairs = zip(trained.trainable_variables, alone.trainable_variables, strict=True)
    return None if all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs) else what


def of_outputs(hvd: Any) -> list[str | None]:
    """Train two outputs with separate denominators; return the differences."""
    own = slice(0, ROWS[0]) if hvd.rank() == 0 else slice(ROWS[0], None)
    sparse = keras.losses.SparseCategoricalCrossentropy

    def losses() -> list[Any]:
        return [sparse(ignore_class=1), sparse(reduction="sum")]

    trained = Trained(losses(), False, outputs=2)
    trained.run([batch_of("classes", False, own, 2)], True)
    alone = make_net(False, 2)
    alone.compile(keras.optimizers.SGD(0.5), losses(), run_eagerly=True)
    alone.train_on_batch(*batch_of("classes", False, slice(None), 2))
    return [same(trained.model, alone, "two outputs")]


def of_passes(hvd: Any) -> list[str | None]:
    """Train two micro-batches per rank, with masked steps and ignored classes."""
    first, last = ROWS[0] // 2, ROWS[0] + 1
    parts = ([0, first], [first, ROWS[0]]) if hvd.rank() == 0 else ([ROWS[0], last], [last, None])
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    trained = Trained(loss, True, passes=2)
    trained.run([batch_of("classes", False, slice(*part)) for part in parts], True)
    alone = make_net(True)
    alone.compile(keras.optimizers.SGD(0.5), loss, run_eagerly=True)
    alone.train_on_batch(*batch_of("classes", False, slice(None)))
    wrong = [same(trained.model, alone, "two passes")]
    several = Trained([loss, loss], False, outputs=2, passes=2)
    try:
        several.run([batch_of("classes", False, slice(0, 2), 2)], True)
        wrong.append("several losses with several passes were accepted")
    except ParamError as error:
        wrong += [] if "backward_passes_per_step=1" in str(error) else [str(error)]
    return wrong


def twice(hvd: Any) -> list[str | None]:
    """Apply an optimizer twice per batch, with two micro-batches per step."""
    trained = Trained(PositiveLoss(), False, passes=2)
    step = trained.steps[0]
    trained.steps = (lambda batch: [step(batch), step(batch)], trained.steps[1])
    try:
        trained.run([batch_of("signs", False, slice(0, 2))], True)
    except ParamError as error:
        return [None if "applies optimizers 2 times per batch" in str(error) else str(error)]
    return ["two applications with several passes were accepted"]


def stated(hvd: Any) -> list[str | None]:
    """Train a custom loss with a method ``denominator``."""
    own = slice(0, ROWS[0]) if hvd.rank() == 0 else slice(ROWS[0], None)
    trained = Trained(PositiveLoss(), False)
    trained.run([batch_of("signs", False, own)], True)
    alone = make_net(False)
    alone.compile(keras.optimizers.SGD(0.5), PositiveLoss(), run_eagerly=True)
    alone.train_on_batch(*batch_of("signs", False, slice(None)))
    return [same(trained.model, alone, "a stated denominator")]


def small_cases() -> list[Case]:
    """Return a case of each kind of denominator and of each reduction."""
    sparse = ("SparseCategoricalCrossentropy", "classes")
    return [
        Case("MeanSquaredError", masked=True),
        Case("MeanSquaredError", options={"reduction": "sum"}),
        Case("CTC", "tokens"),
        Case(*sparse, {"ignore_class": 1}),
        Case(*sparse, {"reduction": "mean"}, weighted=True),
        Case(*sparse, {"reduction": "mean_with_sample_weight", "ignore_class": 1}, True, True),
        Case("Dice", "floats", {"axis": -1}),
    ]


def test_one_loss_of_each_kind_matches_one_process() -> None:
    for wrong in LocalBackend(2, env=QUIET).run(run_all, (small_cases(),)):
        assert wrong == []


@pytest.mark.soak
def test_all_losses_of_keras_match_one_process() -> None:
    names = {
        name
        for name, kind in vars(keras.losses).items()
        if inspect.isclass(kind) and kind is not keras.losses.Loss
    }
    assert names == {*KINDS, *OVER_THE_BATCH}, "a loss of Keras has no case here"
    for wrong in LocalBackend(2, env=QUIET).run(run_all, ([*cases()],)):
        assert wrong == []
