"""Embeddings of a module: which columns they look up, and why a look-up fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hvd_estimators.data.exact import unknown_ids

_SAME_NUMBERS = frozenset(
    {
        *("long", "int", "to", "type", "clone", "contiguous", "detach", "expand"),
        *("view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t"),
        *("__getitem__", "__get__", "select", "narrow", "unbind", "split", "chunk"),
    }
)
"""Functions of torch that return numbers of their first argument, and no others."""


@dataclass(frozen=True)
class Lookup:
    """Call of an embedding.

    Attributes
    ----------
    column : str or None
        The column whose numbers are the ids; None if they were computed.
    is_whole : bool
        Whether the ids are all numbers of the column.
    rows : int
        Number of rows of the embedding.
    ids : torch.Tensor
        The ids.
    """

    column: str | None
    is_whole: bool
    rows: int
    ids: torch.Tensor

    def problem(self) -> str | None:
        """Return why the embedding cannot take the ids; None if it can."""
        name = self.column
        if self.ids.dtype.is_floating_point:
            if name is None:
                return "An embedding takes integers and got floats that the model computed."
            return (
                f"The model's embedding takes integers, and the column {name!r} is "
                f"{str(self.ids.dtype).removeprefix('torch.')}. Set "
                f"column_dtypes={{{name!r}: 'int64'}}."
            )
        if not self.ids.numel():
            return None
        lowest, highest = self.ids.min().item(), self.ids.max().item()
        if lowest >= 0 and highest < self.rows:
            return None
        if name is not None:
            return unknown_ids(name, lowest, highest, self.rows)
        return (
            f"An embedding of {self.rows} rows, for ids 0 to {self.rows - 1}, got ids from "
            f"{lowest} to {highest} that the model computed."
        )


class Lookups(TorchFunctionMode):
    """Context that records the calls of embeddings, with the columns that they look up.

    Parameters
    ----------
    columns : mapping of str to torch.Tensor
        The model's inputs by column.
    """

    def __init__(self, columns: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.found: list[Lookup] = []
        # With the tensors, whose ids no other tensor must get.
        self._origins: dict[int, tuple[torch.Tensor, str]] = {
            id(tensor): (tensor, name) for name, tensor in columns.items()
        }
        self._sizes = {name: tensor.numel() for name, tensor in columns.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch. Called by torch."""
        kwargs = kwargs or {}
        if func in (functional.embedding, functional.embedding_bag):
            named = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            ids = named["input"]
            _, name = self._origins.get(id(ids), (ids, None))
            is_whole = name is not None and self._sizes[name] == ids.numel()
            self.found.append(Lookup(name, is_whole, len(named["weight"]), ids))
        result = func(*args, **kwargs)
        if args and getattr(func, "__name__", "") in _SAME_NUMBERS and id(args[0]) in self._origins:
            _, name = self._origins[id(args[0])]
            for part in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(part, torch.Tensor):
                    self._origins[id(part)] = part, name
        return result

    @property
    def id_limits(self) -> dict[str, int]:
        """Number of ids that each column may have, of the columns that are looked up as a whole."""
        limits: dict[str, int] = {}
        for lookup in self.found:
            if lookup.column is not None and lookup.is_whole:
                rows = limits.get(lookup.column, lookup.rows)
                limits[lookup.column] = min(rows, lookup.rows)
        return limits


def failed_lookup(call: Callable[[], Any], columns: Mapping[str, torch.Tensor]) -> str | None:
    """Return why an embedding fails in a call that raises; None if no embedding does.

    Parameters
    ----------
    call : callable
        Repeats the call.
    columns : mapping of str to torch.Tensor
        See `Lookups`.
    """
    lookups = Lookups(columns)
    try:
        with torch.no_grad(), lookups:
            call()
        return None
    except Exception:
        try:
            return lookups.found[-1].problem() if lookups.found else None
        except RuntimeError:  # a GPU has no further results
            return None
