"""Predictions that the type of their column cannot hold are an error. Runs on the executors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_estimators.exceptions import PredictionError
from hvd_estimators.parquet.columns import Array

__all__ = ["Bounds"]


@dataclass(frozen=True)
class Bounds:
    """What an output has to be within.

    Spark's casts differ: with ANSI rules they fail, without they make up the largest number.

    Attributes
    ----------
    name : str
        What the output is called, for messages.
    type_name : str
        The type, for messages, too.
    limit : float
        No number's size may reach it.
    includes_lowest : bool
        Whether ``-limit`` itself is within, as in whole numbers; fractions are cut off before.
    """

    name: str
    type_name: str
    limit: float
    includes_lowest: bool

    @classmethod
    def of_whole_numbers(cls, name: str, type_name: str, num_bytes: int) -> Bounds:
        """Return those of a type of signed whole numbers."""
        return cls(name, type_name, 2.0 ** (8 * num_bytes - 1), True)

    @classmethod
    def of_decimals(cls, name: str, type_name: str, precision: int, scale: int) -> Bounds:
        """Return those of a decimal type, which is rounded to."""
        limit = 10.0 ** (precision - scale) - 0.5 * 10.0**-scale
        return cls(name, type_name, limit, False)

    def check(self, values: Array) -> None:
        """Make sure that an output is within.

        Raises
        ------
        PredictionError
            If a number is not; NaN is none.
        """
        numbers = np.asarray(values, np.float64)
        if self.includes_lowest:
            numbers = np.trunc(numbers)
        wrong = np.abs(numbers) >= self.limit
        if self.includes_lowest:
            wrong &= numbers != -self.limit
        if wrong.any():
            first = np.asarray(values)[wrong][0]
            raise PredictionError(
                f"{self.name} is {first}, which type {self.type_name} cannot "
                "hold. Set a larger type in output_types, or none and cast what you need."
            )
