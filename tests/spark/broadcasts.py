"""What the driver has sent to the executors, as its disk shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["broadcast_files"]


def broadcast_files(spark: Any) -> set[Path]:
    """Return the files of the broadcast variables that there are, of this and of other tests."""
    return {path for path in Path(spark.sparkContext._temp_dir).iterdir() if path.is_file()}
