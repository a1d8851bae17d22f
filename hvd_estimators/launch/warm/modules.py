"""Modules that a warm process imports in advance, from a fixed list, for a pickled call."""

from __future__ import annotations

import re
import sys

# What a trainer imports when it opens its data. With its first array, PyArrow imports pandas, if
# that is installed. A module that is not installed is skipped.
_OPENED = ("hvd_estimators.loading.petastorm", "pandas", "fsspec.implementations.local")

_OF_OPTIMIZERS = "torch._dynamo"
"""Module that torch imports with the first optimizer, and that takes longer than torch itself."""

_WITH_TORCH = (
    *_OPENED,
    _OF_OPTIMIZERS,
    # Either may reduce gradients.
    "horovod.torch",
    "hvd_estimators.torch.process_group",
)

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")

_CLIENTS = ("s3fs", "gcsfs", "adlfs", "hdfs_native.fsspec")
"""Clients of stores, which ranks import if the driver has: up to a second in each rank."""

_MODULES = {
    "hvd_estimators.keras.trainer": ("hvd_estimators.keras.trainer", *_OPENED),
    "hvd_estimators.lightning.trainer": (
        *("hvd_estimators.lightning.trainer", *_WITH_TORCH, *_LIGHTNING),
        "s3fs",  # imported by Lightning to ask whether a path is in an object store
        "tensorboard.summary.writer.record_writer",
    ),
    "hvd_estimators.torch.trainer": ("hvd_estimators.torch.trainer", *_WITH_TORCH),
    "horovod.keras": ("horovod.keras",),
    "horovod.tensorflow": ("horovod.tensorflow",),
    "horovod.torch": ("horovod.torch",),
    "keras": ("keras",),
    "lightning": ("lightning",),
    "numpy": ("numpy",),
    "pandas": ("pandas",),
    "petastorm": ("petastorm",),
    "pyarrow": ("pyarrow",),
    "pyspark": ("pyspark.sql", "pandas"),
    "pytorch_lightning": ("pytorch_lightning",),
    "tensorflow": ("tensorflow",),
    "torch": ("torch",),
    "torch.optim": ("torch", _OF_OPTIMIZERS),
}
"""The modules to import if a call contains the name of a module or of one of its submodules.

All of them have been checked: importing them starts no thread that a fork loses, initialises no GPU
and draws no random numbers. The user's own modules are never imported in advance, because they may
change before the next launch.
"""

# A short string in a pickle: an opcode, the length and the text.
_NAME_IN_PICKLE = re.compile(rb"\x8c(.)([A-Za-z_][\w.]*)", re.DOTALL)

# Only the start and the end of a call are searched: code and classes precede or follow the data.
_SEARCHED_BYTES = 2**20


def modules_of(call: bytes) -> tuple[str, ...]:
    """Return the modules to import for a pickled call, from `pickle_call`.

    The call contains the names that a function of a script or notebook imports, the modules of its
    arguments' classes, and the trainer of an estimator. A function of an installed module imports
    its modules in each rank.
    """
    names: set[str] = set()
    for part in (call[:_SEARCHED_BYTES], call[_SEARCHED_BYTES:][-_SEARCHED_BYTES:]):
        for length, text in _NAME_IN_PICKLE.findall(part):
            # A longer string only begins like a module name.
            if length[0] == len(text):
                names.add(text.decode())
    modules: set[str] = set()
    for name in names:
        listed = _listed(name)
        modules.update(_MODULES.get(listed, ()))
        if listed.startswith("hvd_estimators"):
            # The driver has imported the one that the user's module belongs to.
            modules -= {package for package in _LIGHTNING if package not in sys.modules}
            modules |= sys.modules.keys() & _CLIENTS
    # Code that uses ``torch.optim.SGD`` contains the three names separately.
    if "torch" in modules and "optim" in names:
        modules.add(_OF_OPTIMIZERS)
    return tuple(sorted(modules))


def _listed(name: str) -> str:
    """Return the listed module to which a module belongs, or an empty string."""
    while name and name not in _MODULES:
        name = name.rpartition(".")[0]
    return name
