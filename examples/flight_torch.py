"""The network of ``flight_networks.py`` in torch."""

from __future__ import annotations

from typing import Any

import torch
from flight_networks import Sizes
from torch import nn

from hvd_estimators.torch import TorchEstimator


class DelayNet(nn.Module):
    """An embedding of each category, followed by dense layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dims = sizes.embedding_dims()
        self.embeddings = nn.ModuleList(map(nn.Embedding, sizes.categories, dims))
        for embedding in self.embeddings:
            # Start near zero: a rare or unseen category should have little effect.
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


def estimator(sizes: Sizes, learning_rate: float, **params: Any) -> TorchEstimator:
    """Return an estimator of the network in torch."""
    network = DelayNet(sizes)
    return TorchEstimator(
        model=network,
        # The learning rate of one rank; training multiplies it by the number of ranks.
        optimizer=torch.optim.Adam(network.parameters(), lr=learning_rate),
        loss=nn.functional.mse_loss,
        **params,
    )
