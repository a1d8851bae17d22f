"""Ranks on a machine whose only address is ``::1``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.timeout(120)]

_PROGRAM = """
from hvd_estimators.launch import LocalBackend, log_to_driver

def total():
    import psutil
    import torch
    from hvd_estimators.torch.collectives import session

    with session("torch", use_gpu=False) as ranks:
        log_to_driver(f"rank {ranks.rank} reaches the driver")
        places = psutil.Process().net_connections()
        used = {place.laddr.ip for place in places if place.status == "ESTABLISHED"}
        return float(ranks.reduce(torch.tensor([ranks.rank + 1.0]), "sum", "total")), used

print(LocalBackend(2, warm_start=False).run(total))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or None in map(shutil.which, ("unshare", "ip")),
    reason="only root can make a network namespace, with Linux's unshare",
)
def test_ranks_reduce_on_the_loopback_of_ipv6() -> None:
    without_ipv4 = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f'{without_ipv4} "$0" -c "$1"', sys.executable, _PROGRAM],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, results = done.stdout.splitlines()
    assert sorted(lines) == [f"rank {rank} reaches the driver" for rank in range(2)]
    assert results == "[(3.0, {'::1'}), (3.0, {'::1'})]"
