"""Application with two executors, each with two GPUs that a discovery script pretends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from servers.driver import Application, application

GPUS = [["4", "7"], ["9", "5"]]
"""The addresses of each executor's GPUs: no two are the same, as on one machine."""

# Each worker runs the script once; the first to make the folder gets the first addresses.
_SCRIPT = """#!/bin/sh
if mkdir "$0.first" 2> /dev/null; then addresses='{}'; else addresses='{}'; fi
echo '{{"name": "gpu", "addresses": ["'$addresses'"]}}'
"""


@contextlib.contextmanager
def gpu_application(folder: Path, **conf: str) -> Iterator[Application]:
    """Run an application on ``local-cluster[2,2,1024]``: four task slots, each with a GPU.

    Parameters
    ----------
    folder : Path
        Existing folder for its files.
    **conf
        Settings that override the defaults; words of a name are joined by ``__``.
    """
    discovery = folder / "gpus.sh"
    discovery.write_text(_SCRIPT.format(*('", "'.join(addresses) for addresses in GPUS)))
    discovery.chmod(0o755)
    settings = {
        "spark.master": "local-cluster[2,2,1024]",
        "spark.driver.host": "127.0.0.1",
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(discovery),
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.resource.gpu.amount": "1",
        **{name.replace("__", "."): value for name, value in conf.items()},
    }
    with application(folder, settings) as made:
        yield made
