"""PyTorch on Spark: `TorchEstimator`, `TorchModel`, `EarlyStopping` and `load_predictor`.

The names are imported on first use, so that a rank can import the trainer without PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators._util.lazy_imports import lazy_names

if TYPE_CHECKING:
    from hvd_estimators.inference.standalone import load_predictor
    from hvd_estimators.torch.callbacks import EarlyStopping
    from hvd_estimators.torch.estimator import TorchEstimator
    from hvd_estimators.torch.model import TorchModel

__all__ = ["EarlyStopping", "TorchEstimator", "TorchModel", "load_predictor"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EarlyStopping": "hvd_estimators.torch.callbacks",
        "TorchEstimator": "hvd_estimators.torch.estimator",
        "TorchModel": "hvd_estimators.torch.model",
        "load_predictor": "hvd_estimators.inference.standalone",
    },
)
