"""A model that is made without its weights trains as one that the driver has loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapted_llama as llama
import cloudpickle
import numpy as np
import pytest
import torch
from lightning_reference import Regression
from lightning_reference import fit as fit_lightning
from parquet_files import write_columns
from rank_pool import shared_ranks
from reference import write_rows
from safetensors.torch import save_file

from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration


def from_config(folder: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig.from_pretrained(folder))


def from_pretrained(folder: str) -> torch.nn.Module:
    from transformers import LlamaForSequenceClassification

    made: torch.nn.Module = LlamaForSequenceClassification.from_pretrained(folder)
    return made


@pytest.mark.parametrize("sharding", ["full", "none"])
def test_ranks_read_the_weights_with_which_training_begins(
    store: Any, tmp_path: Path, sharding: str
) -> None:
    base = str(tmp_path / "base")
    llama.write_base(base)
    rows = llama.texts(21)
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    write_columns(Path(store.get_train_data_path()), columns)
    cloudpickle.register_pickle_by_value(llama)
    try:

        def fit(**params: Any) -> Any:
            given = {**llama.params(base), "backend": shared_ranks(2), "store": store, **params}
            return TorchEstimator(**{**given, "only_trainable": False}).fit_on_parquet()

        whole = fit(model=from_pretrained, init_weights=None)
        given: dict[str, Any] = {"model": from_config, "init_weights": base}
        given["sharding"] = sharding
        # Layers that compute again must not use the cache of decoders.
        given["activation_checkpointing"] = sharding == "full"
        found = fit(**given, run_id="mine")
        resumed = fit(**given, run_id="mine", epochs=3)
    finally:
        cloudpickle.unregister_pickle_by_value(llama)
    expected, begun = whole.getModel(), from_pretrained(base).state_dict()
    for name, value in expected.named_parameters():
        assert (value - begun[name]).abs().max() > 1e-3
        # Adam magnifies the rounding errors of sums over other parts.
        tolerance = {"rtol": 0.0, "atol": 2e-4 if sharding == "full" else 0.0}
        torch.testing.assert_close(found.getModel().get_parameter(name), value, **tolerance)
    assert len(resumed.getHistory()) == 3


def test_a_lightning_module_begins_with_the_weights_of_files(store: Any, tmp_path: Path) -> None:
    write_rows(Path(store.get_train_data_path()), 37)
    module, path = Regression(), str(tmp_path / "begin.safetensors")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    save_file(module.state_dict(), path)
    expected = fit_lightning(shared_ranks(2), store, model=module).getModel()
    found = fit_lightning(shared_ranks(2), store, model=Regression, init_weights=path).getModel()
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    moved = (a - b for a, b in zip(expected.parameters(), module.parameters(), strict=True))
    assert all(each.abs().max() > 0 for each in moved)
