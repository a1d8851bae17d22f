"""A model that is made without its weights trains as one that the driver has loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapted_llama as llama
import cloudpickle
import numpy as np
import pytest
import torch
from parquet_files import write_columns
from rank_pool import shared_ranks

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

        whole = fit(model=from_pretrained)
        given = {"model": from_config, "init_weights": base, "sharding": sharding}
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
