"""`HorovodRunner` on the driver, and its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from hvd_estimators import HorovodRunner, log_to_driver
from hvd_estimators.exceptions import WorkerFailedError

pytestmark = pytest.mark.timeout(120)


def work(base: int, *, factor: int) -> Any:
    rank = int(os.environ["HOROVOD_RANK"])
    print("out", rank)
    print("error", rank, file=sys.stderr)
    log_to_driver(f"message {rank}")
    # Only rank 0's result is returned, so other ranks may return values that cannot be pickled.
    return base * factor if rank == 0 else (yield_ for yield_ in ())


def test_negative_np_runs_on_the_driver_and_shows_all_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert HorovodRunner(np=-2).run(work, base=3, factor=5) == 15

    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == [
        "[0]<stdout>:out 0",
        "[1]<stdout>:out 1",
        "message 0",
        "message 1",
    ]
    assert sorted(shown.err.splitlines()) == ["[0]<stderr>:error 0", "[1]<stderr>:error 1"]


def test_negative_np_needs_no_spark() -> None:
    program = textwrap.dedent(
        """
        import sys
        sys.modules["pyspark"] = None
        from hvd_estimators import HorovodRunner
        print("returned", HorovodRunner(np=-1).run(lambda x: x + 1, x=4))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "returned 5\n"), done.stderr


def test_a_failure_names_the_rank_that_raised() -> None:
    def fail() -> None:
        raise KeyError(os.environ["HOROVOD_RANK"])

    with pytest.raises(WorkerFailedError, match=r"(?s)Rank 0 .*KeyError: '0'"):
        HorovodRunner(np=-1).run(fail)
