"""`LightningModel.evaluate` refers to Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import pytest
from pytorch_lightning import LightningModule

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning import LightningModel


class Line(LightningModule):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", batch["y"].mean())


def test_a_lightning_module_is_referred_to_its_trainer() -> None:
    model = LightningModel(model=Line(), feature_columns=["x"], label_columns=["y"], metrics=[])
    with pytest.raises(ParamError, match=r"validation_step.*Trainer\.validate"):
        model._make_evaluator()
