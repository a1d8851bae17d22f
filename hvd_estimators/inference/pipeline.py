"""Saved pipelines without Spark: their stages in order, on Arrow columns. Imports no PySpark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array, from_vectors, rows_of, to_array, to_lists, to_vectors
from hvd_estimators.data.rows import one_array
from hvd_estimators.data.types import is_list, is_vector
from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.inference.pipeline_stages import (
    FEATURE_STAGES,
    Attributes,
    Columns,
    Stage,
    select_rows,
)
from hvd_estimators.saving.saved import Saved

_SPARK_FEATURE = "org.apache.spark.ml.feature."


class ModelPredictor(Protocol):
    """Predictor of a model, such as `hvd_estimators.inference.standalone.SavedPredictor`.

    Attributes
    ----------
    feature_columns, optional_columns, output_columns : tuple of str
        Columns that it takes, those that it takes if they exist, and those that it makes.
    vector_columns : frozenset of str
        Outputs whose lists of numbers are vectors in Spark.
    default_columns : frozenset of str
        Outputs that are left out if the rows have such a column.
    """

    feature_columns: tuple[str, ...]
    optional_columns: tuple[str, ...]
    output_columns: tuple[str, ...]
    vector_columns: frozenset[str]
    default_columns: frozenset[str]

    def predict_columns(self, columns: Columns) -> tuple[pa.Table, Array | None]:
        """Return the predictions for some rows, and a mask of the rows in them (None: all)."""


class ModelStage(Stage):
    """Stage that adds the predictions of a model.

    Parameters
    ----------
    predictor : ModelPredictor
        The model.
    made : collection of str
        Columns that earlier stages add.
    """

    def __init__(self, predictor: ModelPredictor, made: Collection[str]) -> None:
        self.inputs = predictor.feature_columns
        self.optional_inputs = predictor.optional_columns
        left_out = predictor.default_columns.intersection(made)
        self.outputs = tuple(n for n in predictor.output_columns if n not in left_out)
        self.attributes = Attributes()
        self._predictor = predictor

    def __call__(self, columns: Columns) -> tuple[dict[str, pa.Array], Array | None]:
        """Return the predictions, and a mask of the given rows in them (None: all)."""
        names = (*self.inputs, *self.optional_inputs)
        given = {name: columns[name] for name in names if name in columns}
        table, kept = self._predictor.predict_columns(given)
        made = {name: one_array(table.column(name)) for name in self.outputs}
        for name in self._predictor.vector_columns.intersection(made):
            kind = made[name].type
            if is_list(kind) and not is_list(kind.value_type):
                made[name] = _as_vectors(made[name])
        return made, kept


@dataclass(frozen=True)
class Pipeline:
    """Stages in order.

    Attributes
    ----------
    stages : tuple of Stage
        The stages.
    feature_columns : tuple of str
        Columns that the rows must have.
    optional_columns : tuple of str
        Columns that stages read if the rows have them.
    output_columns : tuple of str
        Columns that the stages add or replace, if the rows have the optional columns.
    sizes : mapping
        Output to the size of its vectors, if known.
    """

    stages: tuple[Stage, ...]
    feature_columns: tuple[str, ...]
    optional_columns: tuple[str, ...]
    output_columns: tuple[str, ...]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, stages: Sequence[Stage], known: Attributes) -> Pipeline:
        """Return a pipeline of some stages, which leave columns with known attributes."""
        needed: dict[str, None] = {}
        optional: dict[str, None] = {}
        for stage in reversed(stages):
            required = stage.inputs
            if stage.may_lack_inputs:
                pairs = zip(stage.inputs, stage.outputs, strict=True)
                required = tuple(name for name, output in pairs if output in needed)
            for name in stage.outputs:
                needed.pop(name, None)
                optional.pop(name, None)
            # The first stage's columns come first.
            needed = dict.fromkeys((*required, *needed))
            optional = dict.fromkeys((*stage.inputs, *stage.optional_inputs, *optional))
        needed = needed or optional
        return cls(
            tuple(stages),
            tuple(needed),
            tuple(name for name in optional if name not in needed),
            tuple(dict.fromkeys(name for stage in stages for name in stage.outputs)),
            known.sizes,
        )

    def __call__(
        self, columns: Mapping[str, Array | pa.Array]
    ) -> tuple[dict[str, pa.Array], Array | None]:
        """Return the added and replaced columns, and a mask of the rows in them (None: all)."""
        current = {name: _as_arrow(column, name) for name, column in columns.items()}
        made: dict[str, None] = {}
        rows = np.arange(len(next(iter(current.values()))))
        count = len(rows)
        for stage in self.stages:
            added, kept = stage(current)
            if kept is not None and not kept.all():
                current, rows = select_rows(current, kept), rows[kept]
            current.update(added)
            made.update(dict.fromkeys(added))
        selected = None
        if len(rows) < count:
            selected = np.zeros(count, np.bool_)
            selected[rows] = True
        return {name: current[name] for name in made}, selected


def read_pipeline(saved: Saved, load_model: Callable[[Saved], ModelPredictor]) -> Pipeline:
    """Return the stages of a saved pipeline, with nested pipelines replaced by their stages.

    Parameters
    ----------
    saved : Saved
        The pipeline.
    load_model : callable
        Loads the predictor of a saved Keras, torch or Lightning model.

    Raises
    ------
    ParamError
        If a stage is not supported.
    StoreError
        If a stage cannot be read.
    """
    known = Attributes()
    stages: list[Stage] = []
    for number, stage in _flat(saved):
        name = stage.class_name.removeprefix(_SPARK_FEATURE)
        if name in FEATURE_STAGES:
            stages.append(FEATURE_STAGES[name](stage, known))
        elif stage.package is not None:
            made = [name for before in stages for name in before.outputs]
            stages.append(ModelStage(load_model(stage), made))
        else:
            raise ParamError(
                f"path: {saved.given!r}: found a {name.rpartition('.')[2]} as stage {number}; "
                f"supported: {', '.join(FEATURE_STAGES)}, KerasModel, LightningModel, TorchModel "
                "and pipelines of these. Load the pipeline with Spark, or save it without the "
                "stage and apply the stage to the rows before predict()."
            )
        known = known.after(stages[-1].outputs, stages[-1].attributes)
    if not stages:
        raise ParamError(f"path: {saved.given!r} holds a pipeline without stages.")
    return Pipeline.of(stages, known)


def _flat(saved: Saved, prefix: str = "") -> Iterator[tuple[str, Saved]]:
    """Yield the number and files of each stage; 2.0 is the first stage of the pipeline 2."""
    for position, stage in enumerate(saved.stages()):
        if stage.is_pipeline:
            yield from _flat(stage, f"{prefix}{position}.")
        else:
            yield f"{prefix}{position}", stage


def _as_arrow(column: Array | pa.Array, name: str) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    if column.dtype == np.float16:
        column = column.astype(np.float32)
    try:
        elements = pa.array(column.reshape(-1))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ColumnError(f"Column {name!r} holds {column.dtype.name}. Convert it.") from error
    return elements if column.ndim == 1 else to_lists(elements, column.shape)


def _as_vectors(column: pa.Array) -> pa.Array:
    """Return lists of numbers, all of one length, as Spark stores vectors."""
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    rows = to_array(rows_of(column, valid), "")
    return to_vectors(rows, None if valid.all() else valid)


def as_lists(column: pa.Array, name: str) -> pa.Array:
    """Return vectors as lists of doubles, and other columns unchanged."""
    if not is_vector(column.type):
        return column
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    array = from_vectors(rows_of(column, valid), name, np.float64)
    return to_lists(pa.array(array.reshape(-1)), array.shape, None if valid.all() else valid)
