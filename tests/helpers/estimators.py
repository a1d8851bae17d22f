"""Params that the fits of tests share."""

from __future__ import annotations

from typing import Any

import torch


def exact_params(backend: Any, store: Any, **params: Any) -> dict[str, Any]:
    """Return params of a fit that is compared with one process: rows in order, the given rate."""
    return {
        **{"backend": backend, "store": store},
        **{"feature_cols": ["features"], "label_cols": ["label"]},
        **{"shuffle": False, "scale_learning_rate": False},
        **{"random_seed": 3, "verbose": 0},
        **params,
    }


def line_estimator(store: Any, width: int = 1, lr: float = 0.01, **params: Any) -> Any:
    """Return a torch estimator of y from x, by a linear net and the squared error."""
    from hvd_estimators.torch import TorchEstimator

    torch.manual_seed(0)
    net = params.pop("model", None) or torch.nn.Linear(width, 1)
    given = {
        **{"store": store, "model": net},
        "optimizer": torch.optim.SGD(net.parameters(), lr=lr),
        "loss": torch.nn.functional.mse_loss,
        **{"feature_cols": ["x"], "label_cols": ["y"], "input_shapes": [[-1, width]]},
        **{"random_seed": 1, "verbose": 0},
    }
    if "backend" not in params:
        given["num_proc"] = 1
    return TorchEstimator(**{**given, **params})
