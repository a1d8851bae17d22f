"""Broadcast files in the driver's temporary folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["broadcast_files"]


def broadcast_files(spark: Any) -> set[Path]:
    """Return the files of all existing broadcast variables, including those of other tests."""
    return {path for path in Path(spark.sparkContext._temp_dir).iterdir() if path.is_file()}
