"""One network in three frameworks: it embeds categories, and regresses a flight's delay.

Each ``..._estimator`` makes the network, and the estimator that trains it. The layers work in
standard units; the outputs, and so the losses, are in minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import lightning
import torch
from flight_data import INDEXED
from torch import nn

from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator


@dataclass(frozen=True)
class Sizes:
    """What a network has to fit.

    Attributes
    ----------
    categories : list of int
        Number of indices of each categorical input.
    continuous : int
        Length of the continuous vector.
    label_mean, label_std : float
        Of the training labels, in minutes.
    """

    categories: list[int]
    continuous: int
    label_mean: float
    label_std: float

    def embedding_dims(self) -> list[int]:
        """Return how many numbers stand for a value of each category."""
        return [min(16, (size + 1) // 2) for size in self.categories]


class DelayNet(nn.Module):
    """The network in torch."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dims = sizes.embedding_dims()
        self.embeddings = nn.ModuleList(map(nn.Embedding, sizes.categories, dims))
        for embedding in self.embeddings:
            # Start near zero: a rare category, or one never seen, should say little.
            nn.init.normal_(embedding.weight, std=0.1)
        self.layers = nn.Sequential(
            nn.Linear(sizes.continuous + sum(dims), 128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 1),
        )
        self.register_buffer("label_mean", torch.tensor(sizes.label_mean))
        self.register_buffer("label_std", torch.tensor(sizes.label_std))

    def forward(self, *features: torch.Tensor) -> torch.Tensor:
        """Predict from one tensor per category, shape (batch,), and the vector, (batch, width)."""
        *categories, continuous = features
        embedded = [
            embedding(category.long())
            for embedding, category in zip(self.embeddings, categories, strict=True)
        ]
        inputs = torch.cat([*embedded, continuous], dim=1)
        return self.label_mean + self.label_std * self.layers(inputs)


class DelayModule(lightning.LightningModule):
    """The same network with Lightning's steps, which get a dict of column name to tensor."""

    def __init__(self, sizes: Sizes, label: str, learning_rate: float) -> None:
        super().__init__()
        self.network = DelayNet(sizes)
        self.label = label
        self.learning_rate = learning_rate

    def forward(self, *features: torch.Tensor) -> torch.Tensor:
        return self.network(*features)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = self(*(batch[name] for name in [*INDEXED, "continuous"]))
        return nn.functional.mse_loss(outputs[:, 0], batch[self.label])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.step(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def keras_network(sizes: Sizes) -> keras.Model:
    """Return the network in Keras."""
    categories = [keras.Input((1,), name=name) for name in INDEXED]
    continuous = keras.Input((sizes.continuous,), name="continuous")
    near_zero = keras.initializers.RandomNormal(stddev=0.1)
    embedded = [
        keras.layers.Flatten()(
            keras.layers.Embedding(size, dim, embeddings_initializer=near_zero.clone())(category)
        )
        for category, size, dim in zip(
            categories, sizes.categories, sizes.embedding_dims(), strict=True
        )
    ]
    x = keras.layers.Concatenate()([*embedded, continuous])
    for width in (128, 64):
        x = keras.layers.Dense(width, activation="relu")(x)
        x = keras.layers.Dropout(0.2)(x)
    x = keras.layers.Dense(1)(x)
    output = keras.layers.Rescaling(sizes.label_std, offset=sizes.label_mean)(x)
    return keras.Model([*categories, continuous], output)


def torch_estimator(sizes: Sizes, learning_rate: float, **params: Any) -> TorchEstimator:
    """Return an estimator of the network in torch."""
    network = DelayNet(sizes)
    return TorchEstimator(
        model=network,
        # The rate of one rank; training multiplies it by the number of ranks.
        optimizer=torch.optim.Adam(network.parameters(), lr=learning_rate),
        loss=nn.functional.mse_loss,
        **params,
    )


def lightning_estimator(sizes: Sizes, learning_rate: float, **params: Any) -> LightningEstimator:
    """Return an estimator of the network in Lightning."""
    (label,) = params["label_cols"]
    return LightningEstimator(model=DelayModule(sizes, label, learning_rate), **params)


def keras_estimator(sizes: Sizes, learning_rate: float, **params: Any) -> KerasEstimator:
    """Return an estimator of the network in Keras."""
    return KerasEstimator(
        model=keras_network(sizes),
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="mse",
        **params,
    )


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "torch": torch_estimator,
    "keras": keras_estimator,
    "lightning": lightning_estimator,
}
