"""A network in three frameworks that embeds categories and predicts a flight's delay.

Each framework has its own module, for example ``flight_torch.py``, which is imported only if that
framework is used. The module's ``estimator`` function builds the network and the estimator that
trains it. The layers work in standard units. The outputs, and so the losses, are in minutes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

FRAMEWORKS = ("torch", "keras", "lightning")


@dataclass(frozen=True)
class Sizes:
    """Numbers of categories, width of the continuous vector, and statistics of the label.

    Attributes
    ----------
    categories : list of int
        Number of indices of each categorical input.
    continuous : int
        Length of the continuous vector.
    label_mean, label_std : float
        Mean and standard deviation of the training labels, in minutes.
    """

    categories: list[int]
    continuous: int
    label_mean: float
    label_std: float

    def embedding_dims(self) -> list[int]:
        """Return the embedding width of each category."""
        return [min(16, (size + 1) // 2) for size in self.categories]


def make_estimator(framework: str, sizes: Sizes, learning_rate: float, **params: Any) -> Any:
    """Return the estimator of the network in a framework, with further params."""
    module = importlib.import_module(f"flight_{framework}")
    return module.estimator(sizes, learning_rate, **params)
