"""Models that are sent to executors in parts, and memory-mapped by the workers there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark import SparkFiles
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from variants import others_in_soak

from hvd_estimators.inference import broadcast

ROWS = 20
WIDTH = 300_000


def make_model(framework: str, seed: int) -> tuple[Any, np.ndarray]:
    """Return a model that looks up numbers in a table of 1.2 MB, and the table."""
    table = np.random.default_rng(seed).normal(size=(WIDTH, 1)).astype(np.float32)
    common = {"feature_columns": ["id"], "label_columns": ["y"], "output_shapes": [[1]]}
    if framework == "keras":
        import keras

        from hvd_estimators.keras import KerasModel

        inputs = keras.Input((1,))
        outputs = keras.layers.Flatten()(keras.layers.Embedding(WIDTH, 1)(inputs))
        model = keras.Model(inputs, outputs)
        model.set_weights([table])
        return KerasModel(model=model, **common), table
    import torch

    from hvd_estimators.lightning import LightningModel
    from hvd_estimators.torch import TorchModel

    class Lookup(torch.nn.Module):
        def __init__(self, weights: torch.Tensor) -> None:
            super().__init__()
            self.table = torch.nn.Embedding.from_pretrained(weights)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x.long().reshape(len(x)))

    cls = TorchModel if framework == "torch" else LightningModel
    return cls(model=Lookup(torch.from_numpy(table)), input_shapes=[[-1, 1]], **common), table


@pytest.mark.once
@pytest.mark.spark
@pytest.mark.parametrize("framework", others_in_soak("torch", "lightning", "keras"))
def test_a_model_in_parts_predicts_the_same(
    spark: SparkSession, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "PART_BYTES", 500_000)
    if framework != "keras":
        from hvd_estimators.torch import serialization

        # The driver uses a file, too.
        monkeypatch.setattr(serialization, "_LARGE_BYTES", 0)
    sent = []
    send = broadcast.SharedBytes.send

    def noted(self: Any, *args: Any) -> Any:
        sent.append(send(self, *args))
        return sent[-1]

    monkeypatch.setattr(broadcast.SharedBytes, "send", noted)
    frame = spark.range(0, ROWS, 1, 3).withColumn("id", F.col("id").cast("double"))
    for seed in range(3):
        model, table = make_model(framework, seed)
        rows = model.transform(frame).collect()
        found = {row["id"]: row["y__output"] for row in rows}
        np.testing.assert_array_equal([found[n] for n in range(ROWS)], table[:ROWS, 0])
    in_parts = [s for s in sent if isinstance(s, broadcast.Parts)]
    assert [len(s.parts) for s in in_parts] == [3] * 3
    folder = Path(SparkFiles.getRootDirectory()) / "hvd_estimators-models"
    files = {path.name for path in folder.iterdir()}
    # The newest two models, and no partial files.
    assert files == {"lock", *(s.digest for s in in_parts[-2:])}
    assert folder.stat().st_mode & 0o777 == 0o700
