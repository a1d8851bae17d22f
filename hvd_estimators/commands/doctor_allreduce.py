"""The doctor's trial: two ranks on this machine reduce a tensor, as training does.

A program of its own (``python -m hvd_estimators.commands.doctor_allreduce FRAMEWORK``), so that who
starts it can end it when its time is up.
"""

from __future__ import annotations

import importlib
import sys

from hvd_estimators.exceptions import HvdEstimatorsError, WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend

__all__ = ["main"]


def main(framework: str) -> list[float]:
    """Run the trial and return what each rank got.

    Parameters
    ----------
    framework : {'torch', 'tensorflow'}
        Whose tensors are reduced.
    """
    # The trial is of Horovod, and the GPUs may be in use.
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
    """Return an error's cause: where a rank failed, the last line of its traceback."""
    if not isinstance(error, WorkerFailedError):
        return str(error)
    told = str(error).partition("\nThe end of its output:")[0]
    return f"rank {error.rank}: {told.splitlines()[-1]}"


if __name__ == "__main__":
    try:
        print(*main(sys.argv[1]))
    except HvdEstimatorsError as failure:
        sys.exit(_in_a_line(failure))
