"""The params that name columns. Runs on the driver."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from hvd_estimators.exceptions import ColumnError, DataError
from hvd_estimators.params import DeclaredParams, declare, names, shapes, text

__all__ = ["ColumnParams"]

_COLUMNS = (
    *("feature_cols", "label_cols", "sample_weight_col"),
    *("categorical_cols", "continuous_cols"),
)


class ColumnParams(DeclaredParams):
    """What the model is given, what it is to give, and what rows count for."""

    feature_cols = declare("Input columns, in the order of the model's inputs.", convert=names)
    label_cols = declare(
        "Label columns, in the order of the model's outputs; [] to train without labels.",
        convert=names,
    )
    sample_weight_col = declare("Column of the rows' weights.", convert=text)
    featuresCol = declare(
        "Another name of feature_cols, for a single one.",
        convert=text,
        accessor="FeaturesCol",
        stands_for="feature_cols",
    )
    labelCol = declare(
        "Another name of label_cols, for a single one.",
        convert=text,
        accessor="LabelCol",
        stands_for="label_cols",
    )
    weightCol = declare(
        "Another name of sample_weight_col.",
        convert=text,
        accessor="WeightCol",
        stands_for="sample_weight_col",
    )
    label_shapes = declare(
        "Shape of each label: of one row, or with -1 for the rows of a batch first.", convert=shapes
    )
    continuous_cols = declare("Continuous columns, passed to a data module.", convert=names)
    categorical_cols = declare("Categorical columns, passed to a data module.", convert=names)

    def _all_feature_cols(self) -> list[str]:
        """Return the input columns and those that a data module wants beside them."""
        wanted = [
            *self.getOrDefault("feature_cols"),
            *(self.getOrDefault("categorical_cols") or []),
            *(self.getOrDefault("continuous_cols") or []),
        ]
        return list(dict.fromkeys(wanted))

    def _needed_columns(self) -> list[str]:
        """Return the columns that training reads."""
        weight = self.getOrDefault("sample_weight_col")
        wanted = [*self._all_feature_cols(), *self.getOrDefault("label_cols")]
        return list(dict.fromkeys([*wanted, *([weight] if weight else [])]))

    @contextlib.contextmanager
    def _naming_params(self) -> Iterator[None]:
        """Let errors about a column say which param names it."""
        try:
            yield
        except (ColumnError, DataError) as error:
            message = str(error)
            for param in _COLUMNS:
                given = self.getOrDefault(param) or []
                names = [given] if isinstance(given, str) else given
                if any(f"olumn {name!r}" in message for name in names):
                    if not re.match(r"\w+:", message):
                        error.args = (f"{param}: {message}", *error.args[1:])
                    break
            raise

    def _text_cols(self) -> Mapping[str, bool]:
        """Return the feature columns that may be text, to whether bytes are text in them, too.

        A hook: a framework whose models take text overrides it.
        """
        return {}
