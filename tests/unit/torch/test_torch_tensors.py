"""Conversion of columns to tensors, and losses against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_estimators.exceptions import DataError
from hvd_estimators.torch.loss import Loss
from hvd_estimators.torch.tensors import TensorSpec

F = torch.nn.functional
ROWS = 5
ONE_LABEL = TensorSpec(("x",), ("y",))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def columns(rng):
    return {
        "pixels": rng.normal(size=(ROWS, 12)),
        "count": np.arange(ROWS, dtype=np.int32),
        "flag": np.arange(ROWS) % 2 == 0,
        "weight": rng.uniform(size=ROWS),
    }


def test_columns_become_float32_tensors_of_their_shapes_by_default(columns):
    spec = TensorSpec(("pixels", "flag"), ("count",), dtypes={"count": "int64"})

    batch = spec.batch(columns)

    pixels, flag = batch.inputs
    (count,) = batch.labels
    assert (pixels.shape, pixels.dtype) == ((ROWS, 12), torch.float32)
    assert (flag.shape, flag.dtype) == ((ROWS,), torch.float32)
    assert (count.shape, count.dtype) == ((ROWS,), torch.int64)
    np.testing.assert_array_equal(pixels.numpy(), columns["pixels"].astype(np.float32))
    assert flag.tolist() == [1, 0, 1, 0, 1]
    assert count.tolist() == [0, 1, 2, 3, 4]


def test_inputs_and_labels_get_the_configured_shapes(columns):
    spec = TensorSpec(
        ("pixels", "count"), ("flag",), None, ((-1, 3, 2, 2), (-1, 1)), ((-1, 1),), {}
    )

    batch = spec.batch(columns)

    np.testing.assert_array_equal(
        batch.inputs[0].numpy(), columns["pixels"].reshape(ROWS, 3, 2, 2).astype(np.float32)
    )
    assert [tuple(tensor.shape) for tensor in batch.inputs] == [(ROWS, 3, 2, 2), (ROWS, 1)]
    assert [tuple(tensor.shape) for tensor in batch.labels] == [(ROWS, 1)]


def test_empty_batches_keep_their_shapes(columns):
    spec = TensorSpec(("pixels",), ("count",), "weight", ((-1, 3, 4),), None, {})

    batch = spec.batch({name: array[:0] for name, array in columns.items()})

    assert tuple(batch.inputs[0].shape) == (0, 3, 4)
    assert batch.rows == len(batch.weights) == 0


def test_shapes_that_do_not_fit_the_column_are_rejected(columns):
    with pytest.raises(RuntimeError):
        TensorSpec(("pixels",), (), None, ((-1, 6),), None, {}).inputs(columns)


@pytest.fixture
def _warn_always():
    """Let torch repeat warnings that another test may have caused before."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("_warn_always")
@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_read_only_columns_are_accepted_without_a_warning(columns, recwarn, dtype):
    for array in columns.values():
        array.flags.writeable = False

    spec = TensorSpec(("pixels",), ("count",), "weight", dtypes={"count": dtype})
    spec.batch(columns)

    # Objects of other tests may be collected meanwhile, with a ResourceWarning.
    assert [str(w.message) for w in recwarn if w.category is not ResourceWarning] == []


@pytest.mark.parametrize(
    ("output", "label", "expected"),
    [
        ((4, 1), (4,), (4, 1)),
        ((4,), (4, 1), (4,)),
        ((4, 2, 3), (4, 6), (4, 2, 3)),
        ((4, 3), (4,), (4,)),  # class indices keep their shape
    ],
)
def test_labels_get_the_outputs_shape_if_sizes_match(output, label, expected):
    labels = [torch.arange(float(np.prod(label))).reshape(label)]

    outputs, aligned = ONE_LABEL.align(torch.zeros(output), labels)

    assert tuple(outputs[0].shape) == output
    assert tuple(aligned[0].shape) == expected
    assert aligned[0].flatten().tolist() == labels[0].flatten().tolist()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.integers(0, 1000))
def test_the_weighted_loss_is_the_weighted_sum_over_rows(weights, seed):
    rng = np.random.default_rng(seed)
    outputs, labels = rng.normal(size=(2, 1, len(weights), 3))

    loss = Loss([F.mse_loss], [1.5])(*tensors(outputs, labels), torch.tensor(weights).double())

    per_row = ((outputs - labels) ** 2)[0].mean(axis=1)
    assert loss.item() == pytest.approx(1.5 * (per_row * weights).sum() / len(weights))


def tensors(outputs, labels):
    return [torch.tensor(array) for array in outputs], [torch.tensor(array) for array in labels]


@pytest.mark.parametrize("number", [2.5, float("nan")])
def test_inputs_that_become_integers_must_be_whole(number):
    spec = TensorSpec(("kind", "x"), (), dtypes={"kind": "int64"})
    given = {"kind": np.array([1.0, number]), "x": np.array([0.5, np.nan])}
    told = f"column_dtypes: .*whole numbers in the column 'kind'.*{number}"
    with pytest.raises(DataError, match=told):
        spec.inputs(given)
    kind, _ = spec.inputs({**given, "kind": np.array([1.0, 4.0])})
    assert kind.tolist() == [1, 4]
