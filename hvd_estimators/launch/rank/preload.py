"""Which modules a process may import before it knows which rank it will be.

Packages of the list below have been looked at: importing them starts no thread that a fork loses,
touches no GPU and draws no random numbers. A user's own modules are never among them: they may have
changed by the next launch.
"""

from __future__ import annotations

import re

__all__ = ["known_module", "modules_of"]

_PACKAGES = (
    "hvd_estimators",
    "horovod",
    "keras",
    "lightning",
    "numpy",
    "pandas",
    "petastorm",
    "pyarrow",
    "pytorch_lightning",
    "tensorflow",
    "torch",
)
# Of these a submodule brings in a framework, and the package itself none.
_BY_SUBMODULE = {"hvd_estimators": None, "horovod": 2}
# The one changes what the other is, which is a job's own affair: others fork from the process, too.
_NEVER = ("horovod.spark", "hvd_estimators.compat")
# Of torch, an optimizer that is made imports another second of it in each rank. The trainers make
# one, whatever their users do.
_IMPORTED_LATER = {
    "hvd_estimators.torch.trainer": "torch._dynamo",
    "hvd_estimators.lightning.trainer": "torch._dynamo",
}
# A short text in a pickle: a code, its length, and the text.
_MENTIONED = re.compile(
    rb"\x8c(.)((?:" + "|".join(_PACKAGES).encode() + rb")(?:\.[A-Za-z_][A-Za-z0-9_]*)*)", re.DOTALL
)
# Code and classes come before data, or after it.
_LOOKED_AT_BYTES = 2**20


def modules_of(call: bytes) -> tuple[str, ...]:
    """Return modules that a pickled call will import, as far as its bytes tell.

    A function that travels by value holds the names of what it imports, and everything that travels
    by reference the name of its module.

    Parameters
    ----------
    call : bytes
        What `hvd_estimators.launch.rank.process.pickle_call` returned.
    """
    found = set()
    for part in (call[:_LOOKED_AT_BYTES], call[_LOOKED_AT_BYTES:][-_LOOKED_AT_BYTES:]):
        for length, text in _MENTIONED.findall(part):
            # What is longer begins like a module and is none.
            if length[0] == len(text):
                found.add(text.decode())
    found |= {_IMPORTED_LATER[name] for name in found & _IMPORTED_LATER.keys()}
    return tuple(sorted({name for name in map(_to_import, found) if name}))


def known_module(name: str) -> str | None:
    """Return the module to import for one, an empty text for none; None if it is not known."""
    return _to_import(name) if name.partition(".")[0] in _PACKAGES else None


def _to_import(name: str) -> str:
    """Return the module to import for one that is mentioned; empty if there is none."""
    package, _, rest = name.partition(".")
    if name in _IMPORTED_LATER.values():
        return name
    if package not in _BY_SUBMODULE:
        return package
    if any(f"{name}.".startswith(f"{never}.") for never in _NEVER):
        return ""
    if not rest:
        return ""
    parts = _BY_SUBMODULE[package]
    return ".".join(name.split(".")[:parts])
