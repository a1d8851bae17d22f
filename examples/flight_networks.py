"""One network in three frameworks: it embeds categories, and regresses a flight's delay.

Each framework has a module of its own, ``flight_torch.py`` for example, which is imported only if
that framework is used. Its ``estimator`` makes the network and the estimator that trains it. The
layers work in standard units; the outputs, and so the losses, are in minutes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

FRAMEWORKS = ("torch", "keras", "lightning")


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


def make_estimator(framework: str, sizes: Sizes, learning_rate: float, **params: Any) -> Any:
    """Return the estimator of the network in a framework, with further params."""
    module = importlib.import_module(f"flight_{framework}")
    return module.estimator(sizes, learning_rate, **params)
