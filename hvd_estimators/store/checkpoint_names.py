"""What the files of a run's checkpoints are called.

A checkpoint is two files: the framework's own, ``checkpoint-000003.ckpt``, and a pointer to it,
``checkpoint-000003.json``, which is written last. There is a checkpoint where there is a pointer.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["SUFFIX", "Position", "file_name", "leftovers", "listed", "pointed", "pointer_of"]

SUFFIX = ".ckpt"
"""Ends the name of the framework's file."""

_POINTER = ".json"


class Position(NamedTuple):
    """How far a run had come; positions are in the order in which they were reached.

    Attributes
    ----------
    epoch : int
        Epochs that were done.
    rows : int
        Rows, over all shards, of the epoch after these; 0 at an epoch's end.
    """

    epoch: int
    rows: int = 0


def file_name(stem: str, position: Position) -> str:
    """Return the name of the framework's file; ``stem`` is the store's ``checkpoint_filename``."""
    within = f"-{position.rows}" if position.rows else ""
    return f"{stem}-{position.epoch:06d}{within}{SUFFIX}"


def pointer_of(path: str) -> str:
    """Return the path of the pointer to a checkpoint's file."""
    return path.removesuffix(SUFFIX) + _POINTER


def pointed(stem: str, names: Iterable[str]) -> list[Position]:
    """Return the positions of which there are pointers among the names of files, in order."""
    return sorted(_positions(stem, names, _POINTER))


def leftovers(stem: str, names: Iterable[str]) -> list[str]:
    """Return the names of files that a checkpoint has left that was never finished."""
    names = list(names)
    whole = {file_name(stem, position) for position in pointed(stem, names)}
    unfinished = [
        name
        for position in _positions(stem, names, SUFFIX)
        if (name := file_name(stem, position)) not in whole
    ]
    # What `LocalStore.open_atomic` calls a file until it is whole.
    partial = re.compile(rf"\.{re.escape(stem)}-\d{{6,}}(-\d+)?\.(ckpt|json)-[0-9a-f]{{32}}")
    return unfinished + [name for name in names if partial.fullmatch(name)]


def listed(stem: str, names: Iterable[str], suffix: str) -> list[str]:
    """Return the names that end in a suffix, with numbers in their order, unfinished ones not."""
    names = list(names)
    left_out = set(leftovers(stem, names))
    return sorted(
        (name for name in names if name.endswith(suffix) and name not in left_out),
        key=lambda name: _in_order(name.removesuffix(suffix)),
    )


def _positions(stem: str, names: Iterable[str], suffix: str) -> list[Position]:
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{6,}})(?:-(\d+))?{re.escape(suffix)}")
    matches = [pattern.fullmatch(posixpath.basename(name)) for name in names]
    return [Position(int(m[1]), int(m[2] or 0)) for m in matches if m is not None]


def _in_order(name: str) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
