"""Labels that are no classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from backends import InProcessBackend
from parquet_files import write_columns

from hvd_estimators.exceptions import DataError, ParamError, ShapeError
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
    [([0] * 39 + [3], None, "3"), ([0] * 39 + [-1], None, "-1"), ([0, 1, 2], [0, 4], "4")],
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


def test_the_error_of_an_embedding_of_floats_names_the_type_to_set(store: Any) -> None:
    write(store, [0, 4], [0])
    with pytest.raises(ShapeError, match=r"kind \(\d+,\) float32 .*'int64' for ids of an"):
        estimator(store, column_dtypes={}).fit_on_parquet()
