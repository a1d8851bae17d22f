"""Trials of the user's objects before training: pickling, and dry runs of the model.

A dry run has no side effects, and only checks shapes. Runs on the driver. Ranks import some modules
that use this one, so it imports no PySpark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from hvd_estimators._util.random_state import kept_random_state, kept_random_state_with_torch
from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ParamError, ShapeError

logger = logging.getLogger(__name__)


def check_sendable(
    name: str, value: Any, pickler: type[cloudpickle.Pickler] = cloudpickle.Pickler
) -> None:
    """Check that an object can be pickled, without spending time on its arrays.

    Parameters
    ----------
    name : str
        Name of the param that holds the value, for the message.
    value : object
        The object to pickle.
    pickler : type
        Pickler class that is used to send the object.

    Raises
    ------
    ParamError
        If the object cannot be pickled.
    """

    class Trial(pickler):
        """Pickler that skips arrays and tensors, which are always picklable but may be large."""

        def persistent_id(self, obj: Any) -> str | None:
            is_array = isinstance(obj, np.ndarray) and not obj.dtype.hasobject
            return "array" if is_array or hasattr(type(obj), "untyped_storage") else None

    def dump(part: Any) -> None:
        with open(os.devnull, "wb") as nowhere:
            Trial(nowhere).dump(part)

    def fails(part: Any) -> bool:
        try:
            dump(part)
        except Exception:
            return True
        return False

    try:
        dump(value)
    except Exception as error:
        path, part = _find(value, fails)
        where = f" at {name}{path}, a {type(part).__name__}" if path else ""
        raise ParamError(
            f"{name}: it is sent to the ranks with cloudpickle, which fails{where}: "
            f"{type(error).__name__}: {error}. Create objects that cannot be sent, such as "
            "locks and open files, within the function that uses them (in a callback: in "
            "on_train_begin), and leave Spark's context, sessions and DataFrames out of functions "
            "and objects."
        ) from error


def _find(value: Any, fails: Callable[[Any], bool], depth: int = 6) -> tuple[str, Any]:
    """Return the access path of the innermost part of a value that fails, and that part."""
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        parts = ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((f"[{index}]", part) for index, part in enumerate(value))
    elif not isinstance(value, (type, FunctionType, ModuleType)):
        parts = ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())
    for step, part in parts if depth else ():
        if fails(part):
            path, innermost = _find(part, fails, depth - 1)
            return f"{step}{path}", innermost
    return "", value


def functions_in(value: Any) -> Iterator[Any]:
    """Yield the plain functions in nested lists, tuples and dicts."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from functions_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from functions_in(entry)


# An unusual width for models, so that rows and columns cannot be confused.
DRY_RUN_ROWS = 11


# Maximum size of a batch that is created for a trial.
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class Trial:
    """Result of a dry run; subclasses of the frameworks may add attributes.

    Attributes
    ----------
    output_shapes : sequence of tuple of int, or None
        Shape of one row of each output, or None if only the ranks find it out.
    predicted_shapes : sequence of tuple of int, or None
        Likewise for predictions, where the model gets no labels; None if they are the same.
    metric_names : sequence of str, or None
        Names of the metrics of training; None if only the ranks find them out.
    takes_one_row : bool or None
        Whether the model can train on a batch of one row; batch normalization and squeezes may
        prevent this. None if unknown.
    class_limits : mapping of str to (int, float or None)
        Number of classes, and the ignored number, by label of class numbers.
    """

    output_shapes: Sequence[tuple[int | None, ...]] | None = None
    takes_one_row: bool | None = None
    class_limits: Mapping[str, tuple[int, float | None]] = field(default_factory=dict)
    predicted_shapes: Sequence[tuple[int | None, ...]] | None = None
    metric_names: Sequence[str] | None = None


def zeros(specs: Sequence[ColumnSpec]) -> Columns:
    """Return rows of zeros, or of empty text, for columns with known shapes."""
    return {spec.name: _zeros(spec) for spec in specs}


def try_batches(dry_run: Callable[[Columns], Trial], columns: Columns, batch_size: int) -> Trial:
    """Try a few rows; if they fail, try the number of rows of a batch.

    Models and training steps may accept only one batch size, and batch normalization fails on one
    row.

    Parameters
    ----------
    dry_run : callable
        Runs some rows through copies of the model and the loss.
    columns : Columns
        Some rows, which are repeated if there are too few.
    batch_size : int
        Number of rows in a batch.

    Raises
    ------
    ShapeError
        If all attempts fail. It is the error of the last one.
    """
    few = repeated(columns, max(DRY_RUN_ROWS, len(next(iter(columns.values())))))
    row_bytes = sum(array[:1].nbytes for array in columns.values())
    try:
        return dry_run(few)
    except ShapeError as error:
        failure = error
    if len(next(iter(few.values()))) != batch_size and row_bytes * batch_size <= _MOST_BYTES:
        try:
            return dry_run(repeated(columns, batch_size))
        except ShapeError as error:
            failure = error
    failure.add_remedy("dry_run=False leaves out this trial on the driver.")
    raise failure


def repeated(columns: Columns, rows: int) -> Columns:
    """Return the given number of rows, starting over at the first row if there are too few."""
    return {name: array[np.arange(rows) % len(array)] for name, array in columns.items()}


def with_open_sizes(
    shapes: Sequence[tuple[int | None, ...]], others: Sequence[tuple[int | None, ...]]
) -> list[tuple[int | None, ...]]:
    """Return shapes with None for each size that differs from the same output's other shape.

    A shape stays as it is if the other one has more or fewer dimensions.
    """
    return [
        tuple(a if a == b else None for a, b in zip(shape, other, strict=True))
        if len(shape) == len(other)
        else shape
        for shape, other in zip(shapes, others, strict=True)
    ]


def _zeros(spec: ColumnSpec) -> Array:
    shape = (DRY_RUN_ROWS, *spec.shape)
    return np.full(shape, "", object) if spec.kind == "text" else np.zeros(shape, spec.dtype)


# Exceptions that mismatched columns can cause, and undefined names, which also fail on every rank.
# Other exceptions say nothing about shapes.
_SHAPE_KINDS = (
    TypeError,
    ValueError,
    RuntimeError,
    LookupError,
    AssertionError,
    NameError,
    Warning,
)
_OTHER_KINDS = (NotImplementedError, RecursionError, UnicodeError)

# Packages that query the process's rank, GPU or environment.
_PACKAGES = ("horovod", "mpi4py", "os", "torch.cuda", "torch.distributed", "torch.xpu")


@contextlib.contextmanager
def traceless() -> Iterator[None]:
    """Run user code in the block and restore the state of the process afterwards.

    Discards this thread's output to the standard streams, hides warnings, and restores the random
    states of Python and NumPy. The caller must pass copies of the user's objects to the code. Only
    one thread at a time can be in the block.
    """
    with kept_random_state():  # one thread at a time, as for streams and warning filters
        muted: Any = _Muted(sys.stdout), _Muted(sys.stderr)
        with (
            contextlib.redirect_stdout(muted[0]),
            contextlib.redirect_stderr(muted[1]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield


@contextlib.contextmanager
def warning_of_draws(param: str) -> Iterator[None]:
    """Warn if the block draws random numbers from generators that training uses, too.

    Their states are restored.

    Parameters
    ----------
    param : str
        The param whose function runs in the block.
    """
    with kept_random_state_with_torch():
        before = _random_states()
        yield
        draws = _random_states() != before
    if draws:
        logger.warning(
            "%s: the function draws random numbers from the generators of training, and rows are "
            "made ahead of training. So another fit with the same random_seed, and a run that "
            "resumes, get other numbers. Set reader_pool_type='process', which seeds them by the "
            "position of the rows.",
            param,
        )


def _random_states() -> list[Any]:
    python, numpy = random.getstate(), pickle.dumps(np.random.get_state())
    torch = sys.modules.get("torch")
    return [python, numpy, None if torch is None else torch.get_rng_state().tolist()]


def leave_to_ranks(error: BaseException, shape_kinds: tuple[type[BaseException], ...] = ()) -> bool:
    """Return whether an exception of a dry run says nothing about shapes; if so, log it.

    Such an exception can occur because the driver is not a Horovod rank, has no GPU, or has other
    files, packages or environment variables. Exceptions of types that mismatched shapes do not
    cause also count.

    Parameters
    ----------
    error : BaseException
        The exception from the user's code.
    shape_kinds : tuple of type
        Exception types that a framework raises for mismatched shapes, in addition to the built-in
        ones.
    """
    judged = isinstance(error, (*_SHAPE_KINDS, *shape_kinds)) and not isinstance(
        error, _OTHER_KINDS
    )
    if judged and not any(map(_comes_from_process, causes(error))):
        return False
    log_untried(error)
    return True


def log_untried(error: BaseException) -> None:
    """Warn that an exception prevented the dry run on the driver."""
    logger.warning(
        "The model could not be tried on the driver (%s: %s). The ranks will show whether it fits "
        "the data. dry_run=False leaves this trial out.",
        type(error).__name__,
        error,
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that led to it, the newest first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        context = cause.__context__
        # A generator that has just ended is none, wherever it is the exception that was handled.
        cause = cause.__cause__ or (None if isinstance(context, StopIteration) else context)


def _comes_from_process(error: BaseException) -> bool:
    """Return whether an exception passed through code that queries the process."""
    traceback = error.__traceback__
    while traceback is not None:
        module = f"{traceback.tb_frame.f_globals.get('__name__')}."
        if module.startswith(tuple(f"{package}." for package in _PACKAGES)):
            return True
        traceback = traceback.tb_next
    return False


class _Muted:
    """Stream that discards the output of one thread and forwards other threads' output."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        written: int = self._stream.write(text)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
