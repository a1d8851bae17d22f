"""The params of a transformation of rows, in an estimator and in its model. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_estimators.loading.transformation import Transformation, make_transformation
from hvd_estimators.params import DeclaredParams, boolean, declare, names

__all__ = ["TransformationParams"]


class TransformationParams(DeclaredParams):
    """What is made of rows between reading and the model."""

    transformation_fn = declare(
        "Row (a dict) to row, applied by the readers. Strings and bytes reach it; what the model "
        "is given has to be numbers."
    )
    transformation_batch_fn = declare(
        "Columns (a dict of NumPy arrays, rows first) to columns of as many rows, applied by the "
        "readers instead of transformation_fn to many rows at a time."
    )
    transformation_edit_fields = declare(
        "Fields that the transformation makes or changes, as (name, dtype, shape): they are cast "
        "and checked."
    )
    transformation_removed_fields = declare(
        "Fields that are dropped after the transformation.", convert=names
    )
    apply_transformation = declare(
        "Whether the model's transform() applies the transformation, too, to its input columns and "
        "to those others that were trained on, as far as the DataFrame has them. By default it "
        "does not, and takes columns as the transformation leaves them.",
        default=False,
        convert=boolean,
    )

    def _make_transformation(
        self, needed: Sequence[str], text: Sequence[str] = ()
    ) -> Transformation | None:
        """Return what is made of rows; None if nothing.

        Parameters
        ----------
        needed : sequence of str
            Fields that must be there, and numbers, in the end.
        text : sequence of str
            Those that may be text, too.
        """
        return make_transformation(self.getOrDefault, needed, text)

    def _transformation_params(self) -> dict[str, Any]:
        """Return these params, those that are set, as an estimator gives them to its model."""
        return {
            name: self.getOrDefault(name)
            for name in TransformationParams._declarations
            if self.isSet(name)
        }
