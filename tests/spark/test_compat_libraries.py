"""Unchanged libraries on ``horovod.spark`` run on this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import InProcessBackend

pytestmark = [pytest.mark.spark, pytest.mark.once]


def test_images_are_read_from_paths(spark: Any, compat: None, store: Any, tmp_path: Path) -> None:
    from horovod.spark.lightning import TorchEstimator, TorchModel
    from pytorch_lightning import LightningModule

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.float().flatten(1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch["image"].reshape([-1, 1, 4, 4]), batch["label"]
            return torch.nn.functional.cross_entropy(self(images), labels.long())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.05)

    def read(row: Any) -> dict[str, Any]:
        return {"image": np.load(row["image"]).astype(np.float32), "label": row["label"]}

    class ImageModel(TorchModel):
        def get_prediction_fn(self) -> Any:
            shape = self.getInputShapes()[0]

            def predict(model: Any, row: Any) -> torch.Tensor:
                data = torch.tensor(np.load(row["image"])).reshape(shape)
                with torch.no_grad():
                    return model(data)

            return predict

    class ImageClassifier(TorchEstimator):
        def get_model_class(self) -> Any:
            return ImageModel

    rng, rows = np.random.default_rng(1), []
    for index in range(24):
        image = rng.normal(size=(1, 4, 4)) * 0.1 + index % 2
        np.save(tmp_path / f"{index}.npy", image)
        rows.append((str(tmp_path / f"{index}.npy"), float(index % 2)))
    frame = spark.createDataFrame(rows, ["image", "label"])
    estimator = ImageClassifier(
        backend=InProcessBackend(),
        store=store,
        model=Net(),
        input_shapes=[[-1, 1, 4, 4]],
        feature_cols=["image"],
        label_cols=["label"],
        transformation_fn=read,
        batch_size=8,
        epochs=5,
        verbose=0,
    )
    predicted = estimator.fit(frame).setOutputCols(["scores"]).transform(frame).collect()
    assert [float(np.argmax(row["scores"])) for row in predicted] == [
        row["label"] for row in predicted
    ]


def test_prepare_data_works_under_horovods_names(spark: Any, compat: None, store: Any) -> None:
    from horovod.spark.common import util
    from horovod.spark.common.store import Store

    assert isinstance(store, Store)
    frame = spark.range(20).selectExpr("cast(id as double) x", "cast(id as double) y")
    with util.prepare_data(2, store, frame, ["y"], ["x"], 0.25, None, False, 1, 0) as index:
        train_rows, val_rows, metadata, _ = util.get_dataset_properties(index)
        assert train_rows + val_rows == 20
        assert list(metadata) == ["x", "y"]
    util.clear_training_cache()
