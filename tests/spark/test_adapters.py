"""Adapters of a Llama from fit to a served row, in files without the frozen base."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapted_llama as llama
import cloudpickle
import numpy as np
import pytest
import torch

from hvd_estimators.exceptions import StoreError
from hvd_estimators.launch import LocalBackend
from hvd_estimators.torch import TorchEstimator, TorchModel, load_predictor

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(llama)
    yield
    cloudpickle.unregister_pickle_by_value(llama)


def test_saved_adapters_predict_with_their_base(spark: Any, store: Any, tmp_path: Path) -> None:
    base, saved = str(tmp_path / "base"), str(tmp_path / "saved")
    llama.write_base(base)
    rows = llama.texts(24)
    numbered = [(number, *row.values()) for number, row in enumerate(rows)]
    # One worker imports the packages of the model.
    frame = spark.createDataFrame(numbered, "id int, text string, label int").coalesce(1)
    params = {**llama.params(base), "epochs": 6}
    model = TorchEstimator(**params, backend=LocalBackend(2), store=store).fit(frame)
    model.save(saved)
    frozen = [p for p in model.getModel().parameters() if not p.requires_grad]
    files = [path for path in Path(saved).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < sum(p.nbytes for p in frozen)

    loaded = TorchModel.load(saved)
    with torch.no_grad():
        batch = llama.tokenized([{"text": row["text"]} for row in rows])
        expected = model.getModel()(**batch).logits.numpy()
    assert (expected.argmax(1) == [row["label"] for row in rows]).all()
    outputs = loaded.transform(frame).orderBy("id").select("label__output").collect()
    found = np.stack([row[0].toArray() for row in outputs])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert model.evaluate(frame).metrics["loss"] < 0.5
    served = load_predictor(saved)([{"text": rows[1]["text"]}])
    np.testing.assert_allclose(served[0]["label__output"], expected[1], rtol=1e-5, atol=1e-6)

    shutil.rmtree(base)
    llama.write_base(base, seed=6)
    assert all(p.is_meta != p.requires_grad for p in loaded.getOrDefault("model").parameters())
    with pytest.raises(StoreError, match=r"model\.safetensors' has changed since the fit"):
        loaded.getModel()
