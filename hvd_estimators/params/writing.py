"""The params of writing a DataFrame as Parquet. Runs on the driver."""

from __future__ import annotations

from hvd_estimators.params import DeclaredParams, boolean, declare, integer

__all__ = ["WritingParams"]


class WritingParams(DeclaredParams):
    """Which rows are for validation, and how all of them are written."""

    validation = declare(
        "Fraction of the rows to validate on (chosen at random, by the seed), or name of a column "
        "that is true, or above zero, for them."
    )
    shuffle_on_write = declare(
        "Write a DataFrame's rows in random order; without effect if shuffle is False. If this is "
        "False they are written faster, and mixed as they are read, as far as memory allows.",
        default=True,
        convert=boolean,
    )
    partitions_per_process = declare(
        "At most as many Parquet files per rank are written.", default=10, convert=integer(1)
    )
    compress_sparse_cols = declare(
        "Write vectors as indices and values of what is not zero.", default=False, convert=boolean
    )
    check_finite = declare(
        "Refuse NaN and infinity when the rows are written.", default=False, convert=boolean
    )
