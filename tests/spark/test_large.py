"""Large models, large rows and many runs on a driver with Spark's defaults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "job",
    [
        *(
            ("fit", f, n)
            for n in ("30000000", "100000000")
            for f in ("torch", "keras", "lightning")
        ),
        # 3 GB: two ranks with gradients and Adam's moments would take 24 GB.
        ("fine_tune", "torch", "750000000"),
        *(("predict", f, "750000000") for f in ("torch", "keras", "lightning")),
        *(("shared_pages", f, "4") for f in ("torch", "lightning")),
        ("images", "1500"),
        ("results", "2"),
        ("flat_disk", "20"),
    ],
    ids="-".join,
)
def test_a_default_driver_is_enough(tmp_path: Path, job: tuple[str, ...]) -> None:
    script = Path(__file__).with_name("large_job.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), *job],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout
