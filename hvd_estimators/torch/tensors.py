"""Turns batches of columns into the tensors that a model and its loss take.

Used on both sides: by the trainer, by the driver's dry run, and by ``transform``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_estimators.launch.rank.liveness import made_progress
from hvd_estimators.loading.batching import Chunk
from hvd_estimators.parquet.columns import Array
from hvd_estimators.torch.copies import ahead_of_use, cuda_copies
from hvd_estimators.torch.outputs import Selected, select_outputs

__all__ = [
    "INPUT_FORMS",
    "Batch",
    "TensorSpec",
    "tensor_batches",
    "with_form",
]

INPUT_FORMS = ("positional", "keyword", "dict")
"""How a module takes its inputs, see `with_form`."""

AnyColumns = Mapping[str, Array | torch.Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """How columns become tensors.

    Attributes
    ----------
    feature_cols, label_cols : tuple of str
        Inputs and targets, in order.
    sample_weight_col : str or None
        Weight of each row.
    input_shapes, label_shapes : tuple of tuple of int, or None
        Shape of each input and target, -1 first; None leaves the columns' own shapes.
    dtypes : mapping
        Column name to the name of a torch dtype; columns that are not named become float32.
    input_form : str
        How the module is called, see `with_form`.
    outputs : tuple of (int or str), or None
        Positions or names of the outputs that are predictions, see `select_outputs`.
    pairs : bool
        Whether each of them pairs with a label, as it does unless one loss takes them all.
    """

    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    sample_weight_col: str | None = None
    input_shapes: tuple[tuple[int, ...], ...] | None = None
    label_shapes: tuple[tuple[int, ...], ...] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    input_form: str = "positional"
    outputs: tuple[int | str, ...] | None = None
    pairs: bool = True

    def call(self, module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
        """Call a module with its inputs."""
        return with_form(module, inputs, self.feature_cols, self.input_form)

    def arguments(self, inputs: list[torch.Tensor]) -> Any:
        """Return inputs as a user's function gets them: a list, or a dict if they have names."""
        if self.input_form == "positional":
            return inputs
        return dict(zip(self.feature_cols, inputs, strict=True))

    def select(self, outputs: Any) -> Selected:
        """Return the outputs that are predictions, in the order of the labels if they pair."""
        return select_outputs(outputs, self.label_cols if self.pairs else (), self.outputs)

    def align(
        self, outputs: Any, labels: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs that are predictions, and labels in their outputs' shapes.

        A label keeps its shape if its elements are not as many, or if ``label_shapes`` is set.
        """
        selected = self.select(outputs)
        is_paired = self.pairs or len(selected) == len(labels)
        if self.label_shapes is not None or not is_paired:
            return selected, list(labels)
        return selected, [
            label.reshape(output.shape) if label.numel() == output.numel() else label
            for output, label in zip(selected, labels, strict=True)
        ]

    def inputs(self, columns: AnyColumns, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Return the model's inputs, each with the rows of the batch first."""
        return self._tensors(columns, self.feature_cols, self.input_shapes, device)

    def batch(self, columns: AnyColumns, device: torch.device | str = "cpu") -> Batch:
        """Return inputs, targets and weights of a batch."""
        weights = None
        if self.sample_weight_col is not None:
            weights = _tensor(columns[self.sample_weight_col], torch.float32, device)
        return Batch(self.inputs(columns, device), self.labels(columns, device), weights)

    def labels(self, columns: AnyColumns, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Return the targets of a batch."""
        return self._tensors(columns, self.label_cols, self.label_shapes, device)

    def _tensors(
        self,
        columns: AnyColumns,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]] | None,
        device: torch.device | str,
    ) -> list[torch.Tensor]:
        tensors = [_tensor(columns[name], self.dtype(name), device) for name in names]
        if shapes is None:
            return tensors
        # Not -1, whose meaning is ambiguous if a batch has no rows.
        return [
            tensor.reshape(len(tensor), *shape[1:])
            for tensor, shape in zip(tensors, shapes, strict=True)
        ]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a column's tensor."""
        dtype: torch.dtype = getattr(torch, self.dtypes.get(name, "float32"))
        return dtype


@dataclass(frozen=True)
class Batch:
    """Tensors of one batch."""

    inputs: list[torch.Tensor]
    labels: list[torch.Tensor]
    weights: torch.Tensor | None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.inputs[0])


def tensor_batches(
    chunks: Iterable[Chunk], device: torch.device | str = "cpu"
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Yield each batch of each chunk as column name to tensor.

    A chunk's blocks become tensors once, without a copy, and torch cuts these into batches and
    columns. For a GPU each block is copied once, while batches of the chunk before are used.

    Parameters
    ----------
    chunks : iterable of Chunk
        The batches.
    device : torch.device or str
        Where the tensors are to be.
    """
    device = torch.device(device)
    blocks = _blocks(chunks)
    if device.type == "cuda":
        blocks = ahead_of_use(blocks, cuda_copies(device))
    with contextlib.closing(blocks):
        for chunk, tensors_of_blocks in blocks:
            made_progress()
            groups = chunk.rows.layout.groups
            cut = (block.split(chunk.sizes) for block in tensors_of_blocks)
            for parts in zip(*cut, strict=True):
                tensors: dict[str, torch.Tensor] = {}
                for group, part in zip(groups, parts, strict=True):
                    columns = part.unbind(1) if len(group) > 1 else (part,)
                    tensors.update(zip(group, columns, strict=True))
                yield tensors


def _blocks(
    chunks: Iterable[Chunk],
) -> Generator[tuple[Chunk, list[torch.Tensor]], None, None]:
    """Yield each chunk with its blocks as tensors; closes the chunks, if they can be closed."""
    try:
        for chunk in chunks:
            yield chunk, [_from_numpy(block) for block in chunk.rows.blocks]
    finally:
        # Not left to the end of references: close() lets go of them only from Python 3.13 on.
        if isinstance(chunks, Generator):
            chunks.close()


def _from_numpy(array: Array) -> torch.Tensor:
    # torch has no read-only tensors, and warns about read-only arrays.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _tensor(
    column: Array | torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    tensor = column if isinstance(column, torch.Tensor) else _from_numpy(column)
    return tensor.to(device, dtype, non_blocking=True)


def with_form(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], names: Sequence[str], form: str
) -> Any:
    """Call a module.

    Parameters
    ----------
    module : torch.nn.Module
        What is called.
    inputs : sequence of torch.Tensor
        One tensor per feature column.
    names : sequence of str
        The columns' names.
    form : str
        ``"positional"``: one argument after the other; ``"keyword"``: by the columns' names;
        ``"dict"``: one argument, a dict of column name to tensor.
    """
    if form == "positional":
        return module(*inputs)
    named = dict(zip(names, inputs, strict=True))
    return module(named) if form == "dict" else module(**named)
