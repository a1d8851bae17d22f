"""TensorFlow's log lines that its own log level does not reach."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from hvd_estimators.launch.gpu import visible_gpus

__all__ = ["LOG_LEVEL", "LOG_LEVEL_VARIABLE", "unnoticed"]

LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
"""Environment variable that says which lines TensorFlow logs; 0 is all of them."""

LOG_LEVEL = {LOG_LEVEL_VARIABLE: "1"}
"""Variables of ranks: TensorFlow logs warnings (of GPUs that it cannot use, say) and errors."""

# How Abseil logs before it is initialized, which TensorFlow never does: the date is missing.
_LINE = re.compile(r"([IWE])0000 00:00:\d+\.\d+ +\d+ \w+\.cc:\d+\] ")
_SEVERITIES = "IWE"
_ALWAYS = (
    re.compile("WARNING: All log messages before absl::InitializeLog"),
    # Of libraries that TensorFlow's own build links twice.
    re.compile(r".*\] Unable to register cu\w+ factory: Attempting to register factory"),
    re.compile(r".*\] computation placer already registered"),
)
_NO_GPU = re.compile(r".*\] failed call to cuInit")


def unnoticed(env: Mapping[str, str]) -> Callable[[Sequence[str]], list[str]] | None:
    """Return what leaves out TensorFlow's lines below the log level of a rank's environment.

    TensorFlow logs some lines before it reads the variable, and some as errors although they are
    none: that CUDA does not start on a machine without GPUs. Runs in the rank's parent.

    Parameters
    ----------
    env : mapping
        The rank's environment.

    Returns
    -------
    callable or None
        Takes lines and returns those to show. None if the environment asks for all lines.
    """
    level = env.get(LOG_LEVEL_VARIABLE, "")
    if not level.isdecimal() or int(level) == 0:
        return None
    below = _SEVERITIES[: int(level)]
    dropped = _ALWAYS if visible_gpus(env) else (*_ALWAYS, _NO_GPU)

    def is_shown(line: str) -> bool:
        if not line.startswith(("I0", "W0", "E0", "WARNING: All")):
            return True
        found = _LINE.match(line)
        if found is not None and found[1] in below:
            return False
        return not any(pattern.match(line) for pattern in dropped)

    return lambda lines: [line for line in lines if is_shown(line)]
