"""Labels that are no classes, and ids that an embedding does not have."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from backends import InProcessBackend
from parquet_files import write_columns

from hvd_estimators.exceptions import DataError, ParamError, PredictionError, ShapeError
from hvd_estimators.torch import TorchEstimator

ROWS = 40


def write(store: Any, kind: Any, label: Any, validation: Any = None) -> None:
    """Write rows whose odd numbers come last, so that a dry run does not see them."""
    columns = {"kind": np.sort(np.resize(kind, ROWS)), "label": np.resize(label, ROWS)}
    write_columns(store.get_train_data_path(), columns, row_group_size=16)
    if validation is not None:
        held_out = {"kind": np.zeros(8, np.int64), "label": np.resize(validation, 8)}
        write_columns(store.get_val_data_path(), held_out)


class Net(torch.nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.kinds = torch.nn.Embedding(5, 4)
        self.last = torch.nn.Linear(4, classes)

    def forward(self, kind: torch.Tensor) -> torch.Tensor:
        return self.last(self.kinds(kind.reshape(-1)))


def estimator(store: Any, **params: Any) -> TorchEstimator:
    net = Net()
    return TorchEstimator(
        **{
            **{"backend": InProcessBackend(), "store": store, "model": net},
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "loss": torch.nn.CrossEntropyLoss(),
            **{"feature_cols": ["kind"], "label_cols": ["label"]},
            **{"column_dtypes": {"kind": "int64"}, "batch_size": 16, "verbose": 0},
            **params,
        }
    )


def launches(store: Any) -> list[str]:
    return [info.run_id for info in store.list_runs()]


OUTSIDE = r"label holds {}; the model's 3 outputs are classes 0 to 2"


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize(
    ("label", "validation", "found"),
    [([1, 2, 3], None, "3"), ([0] * 39 + [-1], None, "-1"), ([0, 1, 2], [0, 4], "4")],
)
def test_labels_that_are_no_classes_are_found_before_training(
    store: Any, label: list[int], validation: Any, found: str, dtype: Any
) -> None:
    held_out = None if validation is None else np.array(validation, dtype)
    write(store, [0, 4], np.array(label, dtype), held_out)

    with pytest.raises(DataError, match=OUTSIDE.format(found)):
        estimator(store, validation=validation is not None).fit_on_parquet()

    assert launches(store) == []


def test_the_ignored_label_is_no_class(store: Any) -> None:
    write(store, [0, 4], [0, 1, 2, 255])

    loss = torch.nn.CrossEntropyLoss(ignore_index=255)
    estimator(store, loss=loss).fit_on_parquet()

    with pytest.raises(ParamError, match=r"class_weight: found a weight of class 3; the model's 3"):
        estimator(store, loss=loss, class_weight={3: 2.0}).fit_on_parquet()


def shifted(columns: Any, name: str, by: int) -> Any:
    """Change a column of the ranks' rows, whose range the driver does not know."""
    changed = np.where(columns["kind"] == 4, columns[name] + by, columns[name])
    return {**columns, name: changed}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("label", OUTSIDE.format("7")),
        ("kind", r"column 'kind' holds ids from \d to 9, and .* has 5 rows, for ids 0 to 4"),
    ],
)
def test_a_rank_names_labels_and_ids_of_unknown_ranges(
    store: Any, column: str, message: str
) -> None:
    write(store, [0, 1, 4], [2])
    transformation = functools.partial(shifted, name=column, by=5)

    dtypes = {"kind": "int64", "label": "int64"}
    fitting = estimator(store, transformation_batch_fn=transformation, column_dtypes=dtypes)
    with pytest.raises(DataError, match=message):
        fitting.fit_on_parquet()


def test_ids_that_an_embedding_lacks_are_found_before_training(store: Any) -> None:
    write(store, [0, 1, 5], [0])

    with pytest.raises(DataError, match=r"'kind' holds ids from 0 to 5, .*cardinalities\(df"):
        estimator(store).fit_on_parquet()

    assert launches(store) == []


def test_a_prediction_names_the_column_and_its_range(store: Any) -> None:
    write(store, [0, 4], [0])
    document, load = estimator(store).fit_on_parquet()._make_predictor()

    with pytest.raises(PredictionError, match=r"'kind' holds ids from -1 to 3, .*has 5 rows"):
        load(document)([np.array([3, -1, 0])])


def test_an_embedding_of_floats_names_its_column(store: Any) -> None:
    write(store, [0, 4], [0])
    with pytest.raises(
        ShapeError, match=r"the column 'kind' is float32. Set column_dtypes=\{'kind': 'int64'\}"
    ):
        estimator(store, column_dtypes={}).fit_on_parquet()
