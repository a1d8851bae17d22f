"""Saved form that torch's estimators share with their models. Runs on the driver."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle
import torch

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import DeclaredParams, param
from hvd_estimators.saving.save import Saved
from hvd_estimators.store import Store
from hvd_estimators.torch.serialization import (
    copied,
    dump_module,
    dump_optimizer,
    load_module,
    load_optimizer,
)
from hvd_estimators.torch.stored_weights import find_weights_in, set_stored_weights, stored_weights


def _dtypes(name: str, value: Mapping[str, str | torch.dtype]) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name}: expected a dict of column to torch dtype, found {value!r}.")
    converted = {}
    for column, dtype in value.items():
        text = str(dtype).removeprefix("torch.")
        named = getattr(torch, text, None)
        if not isinstance(named, torch.dtype):
            raise ParamError(f"{name}: expected torch dtypes such as 'int64', found {dtype!r}.")
        converted[column] = str(named).removeprefix("torch.")  # "int64" for "long"
    return converted


class TorchSharedParams(DeclaredParams, Saved):
    """Saved modules and optimizers, and the types of columns.

    A saved optimizer refers to the module's parameters by name.
    """

    column_dtypes = param(
        "Dict of column to torch dtype, such as {'label': 'int64'}. Other columns become float32.",
        default={},
        convert=_dtypes,
    )

    def _dump_param(self, name: str, value: Any) -> bytes:
        if name == "model" and isinstance(value, torch.nn.Module):
            weights = stored_weights(value)
            if weights is None:
                return dump_module(value)
            saved = copied(value)
            set_stored_weights(saved, weights.without_store)
            return dump_module(saved)
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

    def _further_files(self) -> Iterator[tuple[str, LocalFile]]:
        weights = stored_weights(self.getOrDefault("model"))
        if weights is not None:
            yield from weights.local_copies()

    def _loaded_from(self, path: str) -> None:
        module = self.getOrDefault("model")
        if stored_weights(module) is not None:
            store = Store.create(path)
            find_weights_in(module, store, store.get_full_path(path).rstrip("/"))

    def _saved_to(self, path: str, params: str) -> None:
        weights = stored_weights(self.getOrDefault("model"))
        if weights is not None and weights.folder.startswith(f"{path}/"):
            self._loaded_from(f"{path}/{params}")
