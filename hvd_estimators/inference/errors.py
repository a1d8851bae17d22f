"""Errors of models that fail on a batch of rows. Imports no framework and no PySpark."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hvd_estimators
from hvd_estimators.exceptions import ColumnError, HvdEstimatorsError, PredictionError

_OTHERS = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    os.path.dirname(hvd_estimators.__file__) + os.sep,
    "<frozen ",
)
"""Parts of file names that mark code as not the user's."""

_MOST_CHARS = 1000

_OUT_OF_MEMORY = re.compile("out of memory|OutOfMemory|OOM|MemoryError|ResourceExhausted")


@contextlib.contextmanager
def naming_inputs(
    given: Callable[[], str], describe_expected: Callable[[], str] | None = None
) -> Iterator[None]:
    """Add a description of a model's inputs to its errors.

    Parameters
    ----------
    given : callable
        Returns a description of the inputs, see `described`.
    describe_expected : callable, optional
        Returns the model's description of the inputs it takes; an empty string without one.

    Raises
    ------
    PredictionError
        From any error except the errors of this package.
    """
    try:
        yield
    except HvdEstimatorsError:
        raise
    except Exception as error:
        text = str(error).strip()
        if len(text) > _MOST_CHARS:  # TensorFlow's reason follows stacks of all its operations.
            text = text.rpartition("\n\n")[2]
        raised = f"{type(error).__name__}: {text.rstrip('.')}{_raised_at(error)}"
        expected = describe_expected() if describe_expected is not None else ""
        remedy = (
            "Set inference_batch_size to fewer rows, or lower "
            "spark.sql.execution.arrow.maxRecordsPerBatch."
            if _OUT_OF_MEMORY.search(raised)
            else "Give it columns as those that it was trained on, in the order of its inputs "
            "(feature_columns); apply_transformation=True applies the training's transformation."
        )
        raise PredictionError(
            f"The model failed on some rows. It was called with {given()}"
            f"{f', and takes {expected}' if expected else ''}. It raised {raised}. {remedy}"
        ) from error


@contextlib.contextmanager
def naming_transformation(get: Callable[[str], Any]) -> Iterator[None]:
    """Suggest ``apply_transformation`` in errors about columns, if it may be missing.

    Parameters
    ----------
    get : callable
        Function from the name of a model's param to its value.

    Raises
    ------
    ColumnError
        With the suggestion if the model was trained with a transformation.
    """
    try:
        yield
    except ColumnError as error:
        given = get("transformation_fn") or get("transformation_batch_fn")
        if given is None or get("apply_transformation") or error.column is None:
            raise
        # Replaces advice for training, such as a StringIndexer: the transformation did that.
        error.remedy = (
            "The model was trained with a transformation, and takes columns as that leaves them. "
            "Set apply_transformation=True (model.setApplyTransformation(True)) to apply it to "
            "these columns, or give columns that are transformed already."
        )
        raise


@contextlib.contextmanager
def naming_missing_modules() -> Iterator[None]:
    """Explain how to install a module that a Python worker cannot import.

    Raises
    ------
    PredictionError
        From `ModuleNotFoundError`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name or "of the model"
        raise PredictionError(
            f"The model needs the module {name!r}, which this Python worker cannot import "
            f"({error}). If it is a file of yours, call "
            f"spark.sparkContext.addPyFile('{name.split('.')[0]}.py') before transform(), or "
            "submit the application with --py-files; if it is a package, install it on all "
            "machines."
        ) from error


def _raised_at(error: Exception) -> str:
    """Return the location of an error; if possible, the last one in the user's code.

    Spark shows a Python worker's error without its cause.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _OTHERS)]
    for frame in (own or frames)[-1:]:
        return f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


def described(arrays: Mapping[str, Any]) -> str:
    """Return the names, shapes and dtypes of arrays or tensors, rows first."""
    return ", ".join(
        f"{name} {tuple(array.shape)} {_dtype(array)}" for name, array in arrays.items()
    )


def _dtype(array: Any) -> str:
    # A dtype of NumPy, torch or TensorFlow.
    dtype = array.dtype
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    return "text" if name in ("object", "string") else name
