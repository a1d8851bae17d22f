"""The doctor's allreduce check: two ranks on this machine reduce a tensor, as in training.

It is a separate program (``python -m hvd_estimators.commands.doctor_allreduce FRAMEWORK``), so that
the caller can end it after a timeout.
"""

from __future__ import annotations

import importlib
import sys

from hvd_estimators.exceptions import HvdEstimatorsError, WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend

__all__ = ["main"]


def main(framework: str) -> list[float]:
    """Run the check and return the result of each rank.

    Parameters
    ----------
    framework : {'torch', 'tensorflow'}
        The framework of the tensors.
    """
    # The check is for Horovod only, and the GPUs may be in use.
    backend = LocalBackend(2, env={"CUDA_VISIBLE_DEVICES": ""})
    return backend.run(_allreduce, (framework,))


def _allreduce(framework: str) -> float:
    """Add up a number of each rank. Runs on the ranks."""
    hvd = importlib.import_module(f"horovod.{framework}")
    library = importlib.import_module(framework)
    hvd.init()
    tensor = getattr(library, "tensor", None) or library.constant
    return float(hvd.allreduce(tensor([hvd.rank() + 1.0]), op=hvd.Sum)[0])


def _in_a_line(error: HvdEstimatorsError) -> str:
    """Return an error's cause, which is the last line of the traceback if a rank failed."""
    if not isinstance(error, WorkerFailedError):
        return str(error)
    told = str(error).partition("\nThe end of its output:")[0]
    return f"rank {error.rank}: {told.splitlines()[-1]}"


if __name__ == "__main__":
    try:
        print(*main(sys.argv[1]))
    except HvdEstimatorsError as failure:
        sys.exit(_in_a_line(failure))
