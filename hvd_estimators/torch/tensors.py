"""Tensors of inputs, labels and outputs, and their copies on a GPU.

Used by the trainer on the ranks, by the dry run on the driver, and by ``transform``. Readers put
blocks of many batches into page-locked memory, from which the GPU copies each block
asynchronously. A single copy, in a separate stream, covers all batches and columns. Meanwhile the
GPU computes with earlier blocks and the training loop continues.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import DataError, ShapeError
from hvd_estimators.inference.batch import with_rows
from hvd_estimators.launch.rank.hang_detection import made_progress
from hvd_estimators.loading.blocks import BufferPool, Rows, fresh_buffer
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.loading.collate_fn import map_leaves, require, split_batch
from hvd_estimators.loading.interleave import Prefetch
from hvd_estimators.loading.shuffle import Batches, first_batches

# Name of the prediction in Hugging Face models.
_PREDICTION = "logits"

# Blocks have a few MiB, or are one batch. Only the buffer for shuffling rows is larger.
_MOST_LOCKED_BYTES = 64 * 2**20

T = TypeVar("T")

Copy = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]
"""Function that starts copying tensors, and returns a function that waits for the copies."""


class Selected(list[Any]):
    """Outputs that `select_outputs` has already selected."""


def select_outputs(
    outputs: Any, labels: Sequence[str] = (), selection: Sequence[int | str] | None = None
) -> Selected:
    """Return some of a module's outputs as a list.

    Parameters
    ----------
    outputs : tensor, sequence, mapping, dataclass or named tuple
        The module's return value.
    labels : sequence of str
        Label columns that pair with outputs; empty if none do.
    selection : sequence of (int or str), optional
        Positions or names of the outputs. By default, tensors and sequences are taken in their
        order, without None. Named outputs are selected by the names of the labels. A single label
        without a matching name gets the only tensor, or ``logits``. Without labels, every tensor is
        selected.

    Raises
    ------
    ShapeError
        If a selected output does not exist, or a label has no output.
    """
    if isinstance(outputs, Selected):
        return outputs
    if selection is not None:
        return Selected(_output(outputs, position) for position in selection)
    named = _named(outputs)
    if named is None:
        return Selected(_present(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    if not labels:
        return Selected(tensors.values())
    if all(label in tensors for label in labels):
        return Selected(tensors[label] for label in labels)
    if isinstance(outputs, tuple):
        return Selected(_present(outputs))
    if len(labels) == 1 and len(tensors) == 1:
        return Selected(tensors.values())
    if len(labels) == 1 and _PREDICTION in tensors:
        return Selected([tensors[_PREDICTION]])
    missing = [label for label in labels if label not in tensors]
    raise ShapeError(
        f"the model returns {type(outputs).__name__} with the outputs "
        f"{', '.join(map(str, tensors)) or 'none'}, but no output is named {', '.join(missing)}."
        " Set outputs to the names of one output per label, name label columns and outputs alike, "
        "or return a tuple in the order of label_cols.",
        param="label_cols",
    )


NO_COMPLEX_COLUMN = (
    "transform() has no column for an output of complex numbers. Return "
    "torch.view_as_real(output), its absolute value or its real part, or leave it out with outputs."
)


def require_tensors(selected: Selected, outputs: Any) -> Selected:
    """Return selected outputs if all of them are tensors.

    Raises
    ------
    ShapeError
        If an output is not a tensor.
    """
    for output in selected:
        if not isinstance(output, torch.Tensor):
            raise ShapeError(
                f"the model returns {type(outputs).__name__} of "
                f"{type(output).__name__}. Return a tensor per label: alone, in a tuple, or in a "
                "dict or dataclass by name; or set outputs to those that are tensors, such as [0].",
                param="label_cols",
            )
    return selected


def _output(outputs: Any, position: int | str) -> Any:
    """Return the output at a position, or with a name."""
    named = _named(outputs)
    if isinstance(position, str):
        if named is not None and position in named:
            return named[position]
        names = "no names" if named is None else f"the names {', '.join(map(str, named))}"
        raise ShapeError(
            f"outputs: found {position!r}, and the model returns {_described(outputs)} with "
            f"{names}. Set names that it has, or positions, such as outputs=[0]."
        )
    if named is not None:
        values = list(named.values())
    else:
        values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    if position >= len(values):
        raise ShapeError(
            f"outputs: found position {position}, and the model returns {_described(outputs)}, "
            f"whose positions are 0 to {len(values) - 1}. Set outputs to some of these."
        )
    return values[position]


def _described(outputs: Any) -> str:
    kind = type(outputs).__name__
    sized = isinstance(outputs, (list, tuple, Mapping))
    return f"a {kind} of {len(outputs)}" if sized else f"a {kind}"


def _present(outputs: Sequence[Any]) -> list[Any]:
    """Return outputs without None, which models return for outputs that were not requested."""
    return [output for output in outputs if output is not None]


def _named(outputs: Any) -> Mapping[Any, Any] | None:
    """Return outputs by name; None if they have no names."""
    if isinstance(outputs, Mapping):
        return outputs
    if dataclasses.is_dataclass(outputs):
        return {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    if isinstance(outputs, tuple) and hasattr(outputs, "_asdict"):
        named: Mapping[str, Any] = outputs._asdict()
        return named
    return None


INPUT_FORMS = ("positional", "keyword", "dict")
"""Forms in which a module takes its inputs, see `with_form`."""


def as_tensor(leaf: torch.Tensor | Array) -> Any:
    """Return an array of numbers as a tensor, and other leaves unchanged."""
    if isinstance(leaf, torch.Tensor) or leaf.dtype.kind not in "biufc":
        return leaf
    return from_numpy(leaf)


AnyColumns = Mapping[str, Array | torch.Tensor] | CollatedBatch


class Inputs(list[torch.Tensor]):
    """Inputs of a collated batch, with their names."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__(named.values())
        self.names = tuple(named)


@dataclass(frozen=True)
class TensorSpec:
    """Conversion of columns to tensors.

    Attributes
    ----------
    feature_cols, label_cols : tuple of str
        Inputs and targets, in order.
    sample_weight_col : str or None
        Column with the weight of each row.
    input_shapes, label_shapes : tuple of tuple of int, or None
        Shape of each input and target, -1 first; None keeps the columns' shapes.
    dtypes : mapping
        Column name to the name of a torch dtype; other columns become float32.
    input_form : str
        Form of the module's inputs, see `with_form`.
    outputs : sequence of (int or str), or None
        Positions or names of the outputs that are predictions, see `select_outputs`.
    pairs : bool
        Whether each prediction pairs with a label. False if one loss takes all outputs.
    keeps_dtypes : bool
        Whether columns that ``dtypes`` does not name keep the dtypes of a collate function.
    """

    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    sample_weight_col: str | None = None
    input_shapes: tuple[tuple[int, ...], ...] | None = None
    label_shapes: tuple[tuple[int, ...], ...] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    input_form: str = "positional"
    outputs: Sequence[int | str] | None = None
    pairs: bool = True
    keeps_dtypes: bool = False

    def names(self, inputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """Return the names of inputs."""
        return inputs.names if isinstance(inputs, Inputs) else self.feature_cols

    def named(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return inputs by name."""
        return dict(zip(self.names(inputs), inputs, strict=True))

    def call(self, module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
        """Call a module with its inputs."""
        return with_form(module, inputs, self.names(inputs), self.input_form)

    def arguments(self, inputs: list[torch.Tensor]) -> Any:
        """Return inputs for a user's function: a list, or a dict if the inputs have names."""
        if self.input_form == "positional":
            return inputs
        return self.named(inputs)

    def select(self, outputs: Any) -> Selected:
        """Return the outputs that are predictions, in the order of the labels if they pair."""
        return select_outputs(outputs, self.label_cols if self.pairs else (), self.outputs)

    def align(
        self, outputs: Any, labels: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs that are predictions, and labels in their outputs' shapes.

        A label keeps its shape if its number of elements differs, or if ``label_shapes`` is set.
        Outputs of one row have the dimension of rows, also if the module squeezes it.

        Raises
        ------
        ShapeError
            If there is not one output for each label.
        """
        selected = self.select(outputs)
        if self.pairs and len(selected) != len(labels):
            raise ShapeError(
                f"found {len(selected)} outputs for {len(labels)} label columns. Give "
                "one output per label, or set outputs or loss_form='joint'.",
                param="label_cols",
            )
        if labels:
            selected = Selected(
                with_rows(o, len(labels[0])) if isinstance(o, torch.Tensor) else o for o in selected
            )
        is_paired = self.pairs or len(selected) == len(labels)
        if self.label_shapes is not None or not is_paired:
            return selected, list(labels)
        return selected, [
            label.reshape(output.shape) if label.numel() == output.numel() else label
            for output, label in zip(selected, labels, strict=True)
        ]

    def inputs(self, columns: AnyColumns, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Return the model's inputs, with the rows of the batch first."""
        if isinstance(columns, CollatedBatch):
            return Inputs(self._on_device(self._split(columns)[0], device))
        inputs = self._tensors(columns, self.feature_cols, self.input_shapes, device)
        for name, tensor in zip(self.feature_cols, inputs, strict=True):
            remedy, taken = "Round the column, or name another type.", "the model takes as integers"
            _check_whole(name, columns[name], tensor, "column_dtypes", taken, remedy)
        return inputs

    def batch(self, columns: AnyColumns, device: torch.device | str = "cpu") -> Batch:
        """Return inputs, targets and weights of a batch."""
        weights = None
        if isinstance(columns, CollatedBatch):
            if not columns.rows:
                return Batch([], [], None, 0)
            if columns.weights is not None:
                weights = _tensor(columns.weights, torch.float32, device)
            inputs = self.inputs(columns, device)
            return Batch(inputs, self.labels(columns, device), weights, columns.rows)
        if self.sample_weight_col is not None:
            weights = _tensor(columns[self.sample_weight_col], torch.float32, device)
        return Batch(self.inputs(columns, device), self.labels(columns, device), weights)

    def labels(self, columns: AnyColumns, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Return the targets of a batch.

        Raises
        ------
        DataError
            If a class number is not whole.
        """
        if isinstance(columns, CollatedBatch):
            found = self._split(columns)[1]
            if found and not self.label_cols:
                raise DataError(
                    "collate_fn returned a pair, whose second entry are labels, and there are no "
                    "label_cols. Name them, or return a dict, or the inputs a and b as "
                    "((a, b), None)."
                )
            given = require(found, self.label_cols, "label")
            labels = [*self._on_device(given, device).values()]
            columns = given
        else:
            labels = self._tensors(columns, self.label_cols, self.label_shapes, device)
        for name, label in zip(self.label_cols, labels, strict=True):
            remedy = "Index the classes, with pyspark.ml.feature.StringIndexer for example."
            taken = "the loss takes as class numbers"
            _check_whole(name, columns[name], label, "label_cols", taken, remedy)
        return labels

    def _split(
        self, batch: CollatedBatch
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        weight = [] if self.sample_weight_col is None else [self.sample_weight_col]
        value = map_leaves(as_tensor, batch.value)
        return split_batch(value, self.feature_cols, self.label_cols, weight)

    def _on_device(
        self, named: Mapping[str, torch.Tensor], device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        columns = () if self.keeps_dtypes else (*self.feature_cols, *self.label_cols)
        converted = {*columns, *self.dtypes}
        return {
            name: _tensor(each, self.dtype(name) if name in converted else each.dtype, device)
            for name, each in named.items()
        }

    def _tensors(
        self,
        columns: Mapping[str, Array | torch.Tensor],
        names: Sequence[str],
        shapes: Sequence[Sequence[int]] | None,
        device: torch.device | str,
    ) -> list[torch.Tensor]:
        tensors = [_tensor(columns[name], self.dtype(name), device) for name in names]
        if shapes is None:
            return tensors
        # A shape with -1 is ambiguous if a batch has no rows.
        return [
            tensor.reshape(len(tensor), *shape[1:])
            for tensor, shape in zip(tensors, shapes, strict=True)
        ]

    @property
    def label_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the labels; integers, as class numbers have, if a collate function decides."""
        default = "int64" if self.keeps_dtypes else "float32"
        return [getattr(torch, self.dtypes.get(name, default)) for name in self.label_cols]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a column's tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype_name(name))
        return dtype

    def dtype_name(self, name: str) -> str:
        """Return the name of the dtype of a column's tensor."""
        return str(self.dtypes.get(name, "float32"))


@dataclass(frozen=True)
class Batch:
    """Tensors of one batch."""

    inputs: list[torch.Tensor]
    labels: list[torch.Tensor]
    weights: torch.Tensor | None
    collated_rows: int | None = None
    """Number of rows of a collated batch, whose inputs may have any shape."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.inputs[0]) if self.collated_rows is None else self.collated_rows


def tensor_batches(
    chunks: Iterable[Batches], device: torch.device | str = "cpu", num_batches: int | None = None
) -> Generator[dict[str, torch.Tensor] | CollatedBatch, None, None]:
    """Yield each batch of each chunk as a dict of column name to tensor.

    A `CollatedBatch` is yielded with tensors in place of its arrays.

    A chunk's blocks become tensors once, without a copy. torch then splits the blocks into batches
    and columns. For a GPU, each block is copied once, while batches of the previous chunk are in
    use.

    Parameters
    ----------
    chunks : iterable of Chunk or CollatedBatch
        The batches.
    device : torch.device or str
        Target device of the tensors.
    num_batches : int, optional
        Number of batches that will be used. Only these are copied ahead, because the next ones may
        belong to another pass over the files. Default: all.
    """
    device = torch.device(device)
    if device.type == "cuda":
        blocks = _copied(chunks, cuda_copies(device), num_batches)
    else:
        blocks = _blocks(chunks)
    with contextlib.closing(blocks):
        for chunk, tensors_of_blocks in blocks:
            made_progress()
            if isinstance(chunk, CollatedBatch):
                yield with_tensors(chunk, tensors_of_blocks)
                continue
            groups = chunk.rows.layout.groups
            cut = (block.split(chunk.sizes) for block in tensors_of_blocks)
            for parts in zip(*cut, strict=True):
                tensors: dict[str, torch.Tensor] = {}
                for group, part in zip(groups, parts, strict=True):
                    columns = part.unbind(1) if len(group) > 1 else (part,)
                    tensors.update(zip(group, columns, strict=True))
                yield tensors


def with_tensors(batch: CollatedBatch, tensors: Sequence[torch.Tensor]) -> CollatedBatch:
    """Return a batch with tensors in place of its leaves; see `leaves`."""
    left = iter(tensors)

    def placed(leaf: Any) -> Any:
        return next(left) if isinstance(as_tensor(leaf), torch.Tensor) else leaf

    def filled(part: CollatedBatch) -> CollatedBatch:
        value, weights = map_leaves(placed, part.value), map_leaves(placed, part.weights)
        return dataclasses.replace(part, value=value, weights=weights)

    made = tuple(map(filled, batch.passes))
    return dataclasses.replace(batch, parts=made) if batch.parts else made[0]


def leaves(batch: CollatedBatch) -> list[torch.Tensor]:
    """Return the tensors of a batch, in the order of `map_leaves`."""
    found: list[torch.Tensor] = []

    def keep(leaf: Any) -> None:
        tensor = as_tensor(leaf)
        if isinstance(tensor, torch.Tensor):
            found.append(tensor)

    for part in batch.passes:
        map_leaves(keep, part.value)
        map_leaves(keep, part.weights)
    return found


def _blocks(chunks: Iterable[Batches]) -> Generator[tuple[Batches, list[torch.Tensor]], None, None]:
    """Yield each chunk with its blocks as tensors; closes the chunks, if they can be closed."""
    try:
        for chunk in chunks:
            if isinstance(chunk, CollatedBatch):
                yield chunk, leaves(chunk)
                continue
            assert isinstance(chunk.rows, Rows)
            yield chunk, [from_numpy(block) for block in chunk.rows.blocks]
    finally:
        # Close explicitly: before Python 3.13, a closed generator does not release its references.
        if isinstance(chunks, Generator):
            chunks.close()


def _copied(
    chunks: Iterable[Batches], start_copy: Copy, num_batches: int | None
) -> Generator[tuple[Batches, list[torch.Tensor]], None, None]:
    """Yield copies of each chunk's blocks, ahead of their use up to a number of batches."""
    parts = [chunks]
    if num_batches is not None:
        chunks = iter(chunks)
        parts = [first_batches(chunks, num_batches), chunks]
    try:
        for part in parts:
            yield from ahead_of_use(_blocks(part), start_copy)
    finally:
        if isinstance(chunks, Generator):
            chunks.close()


def from_numpy(array: Array) -> torch.Tensor:
    """Return an array as a tensor; copies a read-only array, about which torch would warn."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _tensor(
    column: Array | torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    tensor = column if isinstance(column, torch.Tensor) else from_numpy(column)
    return tensor.to(device, dtype, non_blocking=True)


def _check_whole(
    name: str, column: Array | torch.Tensor, made: torch.Tensor, param: str, taken: str, remedy: str
) -> None:
    """Check that numbers of a column which became integers were whole."""
    # A check on a GPU would wait for the GPU in each step.
    if made.is_floating_point() or made.is_complex() or made.is_cuda:
        return
    given = column if isinstance(column, torch.Tensor) else from_numpy(column)
    if not given.is_floating_point() or made.dtype == torch.bool:
        return
    flat = given.reshape(-1)
    wrong = flat != made.reshape(-1)
    if wrong.any():
        raise DataError(
            f"expected whole numbers in the column {name!r}, which {taken}, found "
            f"{flat[wrong][0].item():g}. {remedy}",
            param=param,
            column=name,
        )


def with_form(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], names: Sequence[str], form: str
) -> Any:
    """Call a module with its inputs in the given form.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    inputs : sequence of torch.Tensor
        One tensor per feature column.
    names : sequence of str
        The columns' names.
    form : str
        ``"positional"``: one argument per input; ``"keyword"``: keyword arguments by column name;
        ``"dict"``: one argument, a dict of column name to tensor.
    """
    if form == "positional":
        return module(*inputs)
    named = dict(zip(names, inputs, strict=True))
    return module(named) if form == "dict" else module(**named)


def snapshot(value: Any) -> Any:
    """Return a copy of a value's dicts, lists and tuples, with copies of its tensors on the CPU.

    Tensors that share memory, such as tied weights of layers, share memory in the copy.
    """
    memo: dict[Any, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor  # a placeholder
        # Tensors that are sparse, empty or made of several parts have no address.
        if tensor.layout != torch.strided or not tensor.data_ptr():
            return tensor.detach().to("cpu", copy=True)
        position = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if position not in memo:
            memo[position] = tensor.detach().to("cpu", copy=True)
        return memo[position]

    return map_tensors(copied, value)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a copy of a value's dicts, lists and tuples, with a function applied to tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        # copy.copy keeps attributes, such as the versions of layers on Module.state_dict().
        made = copy.copy(value)
        made.update((key, map_tensors(function, entry)) for key, entry in value.items())
        return made
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, entry) for entry in value)
    return value


def call_with_leading(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function with the first arguments, as many as it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*arguments)
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return function(*arguments[:count])


def ahead_of_use(
    blocks: Generator[tuple[T, Sequence[torch.Tensor]], None, None], start_copy: Copy
) -> Generator[tuple[T, list[torch.Tensor]], None, None]:
    """Yield copies of tensors, while the next copies are already in progress.

    A thread reads the blocks and starts their copies, so that the computing thread only waits.

    Parameters
    ----------
    blocks : generator of tuple
        An object that belongs to some tensors, and the tensors.
    start_copy : callable
        Starts copying tensors, and returns a function that returns the copies.
    """
    started = Prefetch(_started(blocks, start_copy), 1, "hvd_estimators copies to the GPU")
    try:
        for item, finish in started:
            yield item, finish()
    finally:
        started.close()


def _started(
    blocks: Generator[tuple[T, Sequence[torch.Tensor]], None, None], start_copy: Copy
) -> Generator[tuple[T, Callable[[], list[torch.Tensor]]], None, None]:
    with contextlib.closing(blocks):
        for item, tensors in blocks:
            yield item, start_copy(tensors)


def gpu_memory(device: torch.device) -> BufferPool | None:
    """Return page-locked memory for batches that a GPU copies itself; None for other devices."""
    return BufferPool(new_buffer=_page_locked) if device.type == "cuda" else None


def _page_locked(size: int) -> memoryview:
    if size > _MOST_LOCKED_BYTES:
        return fresh_buffer(size)
    # torch does not reuse the memory while a view of it exists.
    locked = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memoryview(locked)  # type: ignore[arg-type]


def cuda_copies(device: torch.device) -> Copy:
    """Return a function that copies tensors to a GPU in a separate stream.

    The GPU copies from page-locked memory (`gpu_memory`) asynchronously. CUDA first copies other
    memory in this thread.
    """
    stream: Any = torch.cuda.Stream(device)
    # Tensors that the GPU may not have copied yet, and that must not be overwritten.
    pending: collections.deque[tuple[Any, Sequence[torch.Tensor]]] = collections.deque()

    def start(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        while pending and pending[0][0].query():
            pending.popleft()
        with torch.cuda.stream(stream):
            copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
            copied_event = stream.record_event()
        pending.append((copied_event, tensors))

        def finish() -> list[torch.Tensor]:
            # The GPU waits, not this thread.
            users = torch.cuda.current_stream(device)
            users.wait_event(copied_event)
            for tensor in copies:
                # The memory belongs to the other stream, which must not reuse it too early.
                tensor.record_stream(users)
            return copies

        return finish

    return start
