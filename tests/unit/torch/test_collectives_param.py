"""The param that selects the library of collectives, from the estimator to the ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from backends import InProcessBackend
from pyarrow import parquet
from pytorch_lightning import LightningModule

from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.torch.collectives import current


class Recorder:
    """Callback that records the collectives of the training rank."""

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        recorded.append(current().library)


recorded: list[str] = []


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        recorded.append(current().library)
        return torch.nn.functional.mse_loss(self.layer(batch["x"][:, None])[:, 0], batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(store: Any, cls: Any = TorchEstimator, **params: Any) -> Any:
    recorded.clear()
    folder = Path(store.get_train_data_path())
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"x": np.arange(4, dtype=np.float32), "y": np.ones(4, np.float32)}
    parquet.write_table(pa.table(columns), folder / "a.parquet")
    given: dict[str, Any] = {
        "backend": InProcessBackend(),
        "store": store,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 4,
        "dry_run": False,
        "verbose": 0,
    }
    if cls is TorchEstimator:
        net = params.pop("model", None) or torch.nn.Linear(1, 1)
        given |= {
            "model": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "loss": torch.nn.functional.mse_loss,
            "input_shapes": [[1]],
            "callbacks": [Recorder()],
        }
    else:
        given |= {"model": Module(), "logger": False}
    return cls(**{**given, **params}).fit_on_parquet()


def test_wrong_values_and_combinations_are_rejected_on_the_driver(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TorchEstimator().getCollectives() == "auto"
    assert LightningEstimator(collectives="torch").copy().getCollectives() == "torch"
    with pytest.raises(ParamError, match=r"collectives: expected one of 'auto', .* found 'gloo'"):
        TorchEstimator().setCollectives("gloo")
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(DependencyError, match="Set collectives='torch', or run"):
        fit(store, collectives="horovod")
    assert recorded == []
