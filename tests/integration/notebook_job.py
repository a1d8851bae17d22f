"""Program that defines its networks, as a notebook does; it fits and changes a variable.

Run it as a script with the name of a framework and a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvd_estimators import Store

framework, folder = sys.argv[1:] if __name__ == "__main__" else ("", "")
SCALE = 1.0

if framework == "keras":
    import keras

    class KerasNet(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return SCALE * self.dense(x)

    class Squared(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return SCALE * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

elif framework:
    import torch

    class TorchNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return SCALE * self.dense(x)

    class Descent(torch.optim.SGD):
        def scale(self) -> float:
            return SCALE


if framework == "lightning":
    from pytorch_lightning import LightningModule

    class LightningNet(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return SCALE * self.dense(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.mse_loss(self(batch["features"]), batch["label"][:, None])

        def configure_optimizers(self) -> Any:
            return Descent(self.parameters(), lr=0.01)


def predict(model: Any, rows: Any) -> Any:
    """Return a network's predictions in this process, now."""
    if framework == "keras":
        return np.asarray(model(rows))
    return model(torch.from_numpy(rows)).detach().numpy()


def main() -> None:
    """Fit, and check the classes after each step of a program."""
    global SCALE
    from reference import RecordingBackend, write_rows

    store = Store.create(folder)
    columns = write_rows(Path(store.get_train_data_path()), 32)
    params: dict[str, Any] = {
        "backend": RecordingBackend(1),
        "store": store,
        "feature_cols": ["features"],
        "label_cols": ["label"],
        "batch_size": 16,
        "verbose": 0,
        "random_seed": 1,
    }
    rows = columns["features"]
    watched: list[Any]
    if framework == "keras":
        from hvd_estimators.keras import KerasEstimator

        given: Any = KerasNet()
        given(rows)
        watched = [KerasNet.call, Squared.call]
        estimator: Any = KerasEstimator(model=given, optimizer="sgd", loss=Squared(), **params)
    elif framework == "torch":
        from hvd_estimators.torch import TorchEstimator

        given = TorchNet()
        watched = [TorchNet.forward, Descent.scale]
        params["optimizer"] = Descent(given.parameters(), lr=0.01)
        estimator = TorchEstimator(model=given, loss=torch.nn.functional.mse_loss, **params)
    else:
        from hvd_estimators.lightning import LightningEstimator

        given = LightningNet()
        watched = [LightningNet.forward, Descent.scale]
        estimator = LightningEstimator(model=given, **params)

    def check(step: str, *models: Any) -> None:
        global SCALE
        for function in watched:
            name = function.__qualname__
            kind, attribute = name.split(".")
            assert getattr(globals()[kind], attribute) is function, (step, name)
            assert function.__globals__ is globals(), (step, name)
        for model in models:
            assert type(model) is type(given), step
            SCALE = 1.0
            before = predict(model, rows)
            SCALE = 10.0
            np.testing.assert_allclose(predict(model, rows), 10 * before, rtol=1e-5, err_msg=step)
            SCALE = 1.0

    fitted = estimator.fit_on_parquet()
    trained = fitted.getModel()
    check("fit", given, trained)
    assert np.abs(predict(trained, rows) - predict(given, rows)).max() > 1e-3
    document, load = fitted._make_predictor()
    content = document if isinstance(document, bytes) else Path(document.path).read_bytes()
    load(content)
    check("predict", given, trained)
    saved = fitted._load_params({"model": fitted._dump_param("model", trained)})["model"]
    check("load", given, trained, saved)
    assert estimator._load_params({"model": estimator._dump_param("model", given)})
    check("load the estimator", given)


if __name__ == "__main__":
    main()
