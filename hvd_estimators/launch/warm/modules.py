"""Modules that a warm process imports before it knows its rank: a fixed list per framework.

All of them have been checked: importing them starts no thread that a fork loses, initialises no GPU
and draws no random numbers. The user's own modules are never imported in advance, because they may
change before the next launch. Runs on the driver.
"""

from __future__ import annotations

import re

__all__ = ["modules_of"]

# The first torch optimizer imports more of torch, which takes another second in each rank. The
# trainers always create one.
_OPTIMIZERS = "torch._dynamo"

_MODULES = {
    "hvd_estimators.keras.trainer": ("hvd_estimators.keras.trainer",),
    "hvd_estimators.lightning.trainer": ("hvd_estimators.lightning.trainer", _OPTIMIZERS),
    "hvd_estimators.torch.trainer": ("hvd_estimators.torch.trainer", _OPTIMIZERS),
    "horovod.keras": ("horovod.keras",),
    "horovod.tensorflow": ("horovod.tensorflow",),
    "horovod.torch": ("horovod.torch",),
    "keras": ("keras",),
    "lightning": ("lightning",),
    "numpy": ("numpy",),
    "pandas": ("pandas",),
    "petastorm": ("petastorm",),
    "pyarrow": ("pyarrow",),
    "pytorch_lightning": ("pytorch_lightning",),
    "tensorflow": ("tensorflow",),
    "torch": ("torch",),
}
"""The modules to import if a call contains the name of a module or of one of its submodules."""

# A short string in a pickle: an opcode, the length and the text.
_MENTIONED = re.compile(
    rb"\x8c(.)((" + "|".join(map(re.escape, _MODULES)).encode() + rb")(?:\.\w+)*)", re.DOTALL
)

# Only the start and the end of a call are searched: code and classes precede or follow the data.
_SEARCHED_BYTES = 2**20


def modules_of(call: bytes) -> tuple[str, ...]:
    """Return the modules to import for a pickled call, from `pickle_call`.

    The call contains the names that a function of a script or notebook imports, the modules of its
    arguments' classes, and the trainer of an estimator. A function of an installed module is
    pickled by its name, which says nothing about its imports.
    """
    found: set[str] = set()
    for part in (call[:_SEARCHED_BYTES], call[_SEARCHED_BYTES:][-_SEARCHED_BYTES:]):
        for length, text, name in _MENTIONED.findall(part):
            # A longer string only begins like a module name.
            if length[0] == len(text):
                found.update(_MODULES[name.decode()])
    return tuple(sorted(found))
