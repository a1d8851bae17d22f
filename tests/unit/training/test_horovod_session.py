"""Ranks of one framework whose process imports Horovod's part of another one."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
import horovod.{first} as hvd
from horovod.common import process_sets
from hvd_estimators.training.horovod_session import horovod_session

for _ in range(2):
    with horovod_session(hvd, None):
        import horovod.{second}

        print(hvd.global_process_set.size(), process_sets.global_process_set.rank())
horovod.{second}.init()
print(horovod.{second}.global_process_set.size())
"""


def test_another_framework_that_is_imported_while_ranks_train_takes_nothing_away() -> None:
    program = textwrap.dedent(PROGRAM).format(first="tensorflow", second="torch")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.stdout.splitlines() == ["1 0", "1 0", "1"], ended.stderr[-4000:]
