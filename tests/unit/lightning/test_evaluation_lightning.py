"""`LightningModel.evaluate`: plain modules evaluate as in torch; LightningModules are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch.nn import functional

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning import LightningEstimator, LightningModel

FITTED: dict[str, Any] = {"model": None, "history": [], "optimizer": None, "run_id": "r"}


class Line(LightningModule):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", batch["y"].mean())


def test_a_plain_module_computes_in_the_trainers_precision() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    estimator = LightningEstimator(
        model=net,
        loss=functional.mse_loss,
        metrics=[functional.l1_loss],
        feature_cols=["x"],
        label_cols=["y"],
        trainer_args={"precision": "bf16-mixed"},
    )
    kwargs = estimator._get_model_kwargs(**{**FITTED, "model": net}, metadata={})
    document, load, combine = LightningModel(**kwargs)._make_evaluator()
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(9, 2)), "y": rng.normal(size=9)}
    sums = load(document).start()
    sums.add(columns)
    rows, values = combine([sums.state()])
    x, y = (torch.from_numpy(column).float() for column in columns.values())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = net(x).reshape(-1)
        expected = {
            "loss": functional.mse_loss(output, y).item(),
            "l1_loss": functional.l1_loss(output, y).item(),
        }
    assert rows == 9
    assert values == pytest.approx(expected, rel=1e-5)


def test_a_lightning_module_is_referred_to_its_trainer() -> None:
    model = LightningModel(model=Line(), feature_columns=["x"], label_columns=["y"], metrics=[])
    with pytest.raises(ParamError, match=r"validation_step.*Trainer\.validate"):
        model._make_evaluator()
