"""Params for rows of any length, which torch estimators share with their models.

Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import DeclaredParams, boolean, param


def _function(
    name: str, value: Callable[[list[dict[str, Any]]], Any]
) -> Callable[[list[dict[str, Any]]], Any]:
    if not callable(value):
        raise ParamError(f"{name}: expected a function of a list of rows (dicts), found {value!r}.")
    return value


def _padding(name: str, value: Any) -> dict[str, float]:
    is_valid = isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(number, (int, float)) for key, number in value.items()
    )
    if not is_valid:
        raise ParamError(
            f"{name}: expected a dict of column to the number after its rows' ends, such as "
            f"{{'tokens': 0}}, found {value!r}."
        )
    return dict(value)


class CollateParams(DeclaredParams):
    """Params that make batches of rows of any length and type."""

    collate_fn = param(
        "Function that makes a batch of a list of rows, as in torch.utils.data.DataLoader. A row "
        "is a dict of column to value: a number, text, bytes, a NumPy array of any length, a list, "
        "a dict (struct or map), a datetime or None. The function returns a tensor (the input), a "
        "tuple (inputs, labels), or a dict of tensors: label_cols are its labels, and all other "
        "entries are inputs, those of feature_cols first. A LightningModule gets the batch "
        "unchanged. The readers' workers call it in one thread at a time, or in processes with "
        "reader_pool_type='process'. transform(), evaluate() and load_predictor() call it as well, "
        "for predictions on rows without labels.",
        convert=_function,
    )
    padding = param(
        "Dict of column to number, such as {'tokens': 0}: each batch's arrays in the column are "
        "padded with the number to the longest one. Replaces collate_fn.",
        convert=_padding,
    )
    masks = param(
        "Whether the inputs get a boolean mask <column>_mask for each padded feature column, true "
        "for a row's own elements. Masks follow the feature columns.",
        default=False,
        convert=boolean,
    )


COLLATE_PARAMS = tuple(CollateParams._declarations)
"""Names of the params."""
