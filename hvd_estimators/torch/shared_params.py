"""Params and saved form that torch's estimators share with their models. Runs on the driver."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import DeclaredParams, boolean, param
from hvd_estimators.saving.save import Saved
from hvd_estimators.torch.serialization import (
    dump_module,
    dump_optimizer,
    load_module,
    load_optimizer,
)


def _collate_fn(
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


class TorchSharedParams(DeclaredParams, Saved):
    """Params that make batches, and saved modules and optimizers.

    A saved optimizer refers to the module's parameters by name.
    """

    collate_fn = param(
        "Function that makes a batch of a list of rows, as in torch.utils.data.DataLoader. A row "
        "is a dict of column to value: a number, text, bytes, a NumPy array of any length, a list, "
        "a dict (struct or map), a datetime or None. The function returns a tensor (the input), a "
        "tuple (inputs, labels), or a dict of tensors: label_cols are its labels, and all other "
        "entries are inputs, with feature_cols first. A LightningModule gets the batch "
        "unchanged. The readers' workers call it in one thread at a time, or in processes with "
        "reader_pool_type='process'. transform(), evaluate() and load_predictor() call it as well, "
        "for predictions on rows without labels.",
        convert=_collate_fn,
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

    def _dump_param(self, name: str, value: Any) -> bytes:
        if name == "model" and isinstance(value, torch.nn.Module):
            return dump_module(value)
        model = self.getOrDefault("model") if name == "optimizer" else None
        if isinstance(model, torch.nn.Module):
            return dump_optimizer(value, model)
        return cloudpickle.dumps(value)

    def _load_params(self, documents: dict[str, bytes]) -> dict[str, Any]:
        documents = dict(documents)
        model, optimizer = documents.pop("model", None), documents.pop("optimizer", None)
        values = super()._load_params(documents)
        module = self.getOrDefault("model")
        if model is not None:
            is_module = zipfile.is_zipfile(io.BytesIO(model))
            module = values["model"] = (load_module if is_module else cloudpickle.loads)(model)
        if optimizer is not None and isinstance(module, torch.nn.Module):
            values["optimizer"] = load_optimizer(optimizer, module)
        elif optimizer is not None:
            values["optimizer"] = cloudpickle.loads(optimizer)
        return values


COLLATE_PARAMS = ("collate_fn", "padding", "masks")
"""Params that make batches of rows of any length and type."""
