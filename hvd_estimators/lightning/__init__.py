"""Lightning on Spark: `LightningEstimator` and `LightningModel`.

`load_predictor` loads a saved model to predict without Spark.

Names are imported on first use, so that a rank can import the trainer without PySpark.
``TorchEstimator`` and ``TorchModel`` are aliases of the estimator and its model: their names in
``horovod.spark``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators._util.lazy_imports import lazy_names

if TYPE_CHECKING:
    from hvd_estimators.inference.standalone import load_predictor
    from hvd_estimators.lightning.estimator import LightningEstimator, TorchEstimator
    from hvd_estimators.lightning.model import LightningModel, TorchModel

__all__ = ["LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel", "load_predictor"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "LightningEstimator": "hvd_estimators.lightning.estimator",
        "LightningModel": "hvd_estimators.lightning.model",
        "TorchEstimator": "hvd_estimators.lightning.estimator",
        "TorchModel": "hvd_estimators.lightning.model",
        "load_predictor": "hvd_estimators.inference.standalone",
    },
)
