"""Choice between Horovod and torch.distributed for the ranks of a fit."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from hvd_estimators._util.install_hints import BUILD_HOROVOD, INSTALL
from hvd_estimators.exceptions import DependencyError
from hvd_estimators.launch.horovod_build import (
    DISTRIBUTIONS,
    TITLES,
    horovod_problem,
    installed_version,
)

COLLECTIVES = ("auto", "horovod", "torch")
"""Values of the param ``collectives``."""


def choose_collectives(wanted: str, framework: str = "torch") -> tuple[str, str]:
    """Return ``"horovod"`` or ``"torch"`` for a value of the param ``collectives``, and the reason.

    Runs on the driver, which decides for all ranks.

    Parameters
    ----------
    wanted : str
        One of `COLLECTIVES`.
    framework : str
        The framework of the ranks' tensors, ``"torch"`` or ``"tensorflow"``.

    Raises
    ------
    DependencyError
        If Horovod is wanted, and it is not built for the framework. Also if torch is not installed
        and is wanted, or Horovod cannot replace it.
    """
    problem = "" if wanted == "torch" else why_not_horovod(framework)
    if wanted != "torch" and not problem:
        built = f"it is built for this {TITLES[framework]}"
        return "horovod", "collectives='horovod'" if wanted == "horovod" else built
    if wanted == "horovod":
        raise DependencyError(
            f"collectives: found 'horovod', and {problem} Set collectives='torch', or run "
            f"{BUILD_HOROVOD}"
        )
    if find_spec("torch") is None:
        needed = f"{problem} Run one of them:" if problem else "Run"
        horovod = f" or {BUILD_HOROVOD}" if problem else ""
        raise DependencyError(
            f"collectives: found {wanted!r}, which needs torch, and torch is not installed. "
            f"{needed} {INSTALL['torch']}{horovod}"
        )
    return "torch", problem or "collectives='torch'"


def why_not_horovod(framework: str) -> str:
    """Return a sentence that says why this process cannot use Horovod; empty if it can."""
    unfit = horovod_problem(framework)
    if unfit is not None:
        return f"{unfit}."
    try:
        importlib.import_module(f"horovod.{framework}")
    except (ImportError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        version = installed_version(*DISTRIBUTIONS[framework])
        return f"this Python has no Horovod for {TITLES[framework]} {version} ({reason})."
    return ""


def require_horovod(framework: str) -> None:
    """Check that this rank can use Horovod, which the driver chose.

    Raises
    ------
    DependencyError
        If it cannot.
    """
    reason = why_not_horovod(framework)
    if reason:
        raise DependencyError(
            f"collectives: the driver chose Horovod for all ranks, and here {reason} Run "
            f"{BUILD_HOROVOD} on every machine, or set collectives='torch'."
        )
