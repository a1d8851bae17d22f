"""Settings of one fit: the values of the estimator's params, read once. Runs on the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.manifest import ColumnSpec, JoinedSpec
from hvd_estimators.data.rows import ROWS
from hvd_estimators.data.types import TextColumns
from hvd_estimators.exceptions import ColumnError, HvdEstimatorsError, ParamError
from hvd_estimators.fitting.stores import default_store
from hvd_estimators.inference.classification import class_columns, resolve_kind
from hvd_estimators.loading.collate import BoundedCollate, Collate
from hvd_estimators.loading.collate_fn import make_collate
from hvd_estimators.loading.shuffle import SHUFFLE_BUFFER_BYTES
from hvd_estimators.loading.transform import Transformation, make_transformation
from hvd_estimators.params import DeclaredParams
from hvd_estimators.store import Store

_COLUMNS = (
    *("feature_cols", "label_cols", "sample_weight_col"),
    *("categorical_cols", "continuous_cols"),
)


@dataclass(frozen=True)
class Settings:
    """The values of an estimator's params, as attributes: ``settings.batch_size``.

    A property with the name of a param replaces an unset value by what the fit uses.

    Attributes
    ----------
    values : mapping
        Value by param.
    defaults : mapping
        Default value by param.
    given : frozenset of str
        Params that the user has set, by any of their names.
    other_names : mapping of str to str
        The names by which the user has set params, such as featuresCol for feature_cols.
    upstream_names : bool
        True for the names of ``horovod.spark``: "group_0_label" for a metric, and no column
        "prediction".
    """

    values: Mapping[str, Any] = field(repr=False)  # some hold credentials
    defaults: Mapping[str, Any] = field(repr=False)
    given: frozenset[str]
    other_names: Mapping[str, str] = field(default_factory=dict)
    upstream_names: bool = False

    needs_all_columns: ClassVar[bool] = True
    """False if the model can ignore fields that a transformation leaves out."""

    @classmethod
    def of(cls, params: DeclaredParams, upstream_names: bool = False) -> Self:
        """Read the params of an estimator."""
        names = params._declarations
        return cls(
            {name: params.getOrDefault(name) for name in names},
            params._defaults(),
            frozenset(filter(params._is_given, names)),
            params._names_as_set(),
            upstream_names,
        )

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that failed: raise its own error
            return object.__getattribute__(self, name)
        if name.startswith("__") or name not in self.values:
            raise AttributeError(f"the estimator has no param {name!r}")
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a param as the user set it; ``default`` if there is no such param."""
        return self.values.get(name, default)

    def differs(self, name: str) -> bool:
        """Return whether the value of a param is not its default."""
        return bool(self.values[name] != self.defaults.get(name))

    def in_fields_of(self, spec: type[Any]) -> dict[str, Any]:
        """Return the values of the params that a dataclass has fields of the same name for."""
        names = [field.name for field in fields(spec)]
        return {name: getattr(self, name) for name in names if name in self.values}

    @cached_property
    def store(self) -> Store:
        """The store that is set, or the application's default."""
        given: Store | None = self.values["store"]
        return default_store() if given is None else given

    @property
    def shuffle_buffer_size(self) -> int:
        """Bytes of rows that each rank holds for shuffling."""
        given: int | None = self.values["shuffle_buffer_size"]
        return SHUFFLE_BUFFER_BYTES if given is None else given

    @property
    def val_batch_size(self) -> int:
        """Rows of a validation batch."""
        return int(self.values["val_batch_size"] or self.batch_size)

    @cached_property
    def inputs(self) -> InputColumns:
        """The model's inputs, and the columns that they are made of.

        Raises
        ------
        ParamError
            If an input that is made of several columns has the name of another column.
        """
        others = [*self.label_cols, *self._further_columns]
        others += [self.sample_weight_col] if self.sample_weight_col else []
        inputs = InputColumns.of(self.feature_cols, kept=others)
        clashes = [name for name in inputs.matrices if name in others]
        if clashes:
            raise ParamError(
                f"a list of columns is the input {clashes[0]!r}, which is also the "
                f"name of another column. Name the list by a dict, such as {{'numbers': "
                f"{list(inputs.matrices[clashes[0]][:2])}}}.",
                param="feature_cols",
            )
        return inputs

    @property
    def _further_columns(self) -> list[str]:
        return [*(self.categorical_cols or []), *(self.continuous_cols or [])]

    @property
    def all_feature_cols(self) -> list[str]:
        """The input columns, followed by the additional columns of a data module."""
        return list(dict.fromkeys([*self.inputs.columns, *self._further_columns]))

    @property
    def needed_columns(self) -> list[str]:
        """The columns that training reads."""
        weight = [self.sample_weight_col] if self.sample_weight_col else []
        return list(dict.fromkeys([*self.all_feature_cols, *self.label_cols, *weight]))

    @property
    def text_cols(self) -> Mapping[str, bool]:
        """The feature columns that may be text; True if bytes are text, too.

        Override this for a framework whose models accept text.
        """
        return {}

    @property
    def allowed_text(self) -> TextColumns:
        """The columns that may be written as text, or as any type; True for all as text."""
        columns = self.padding or ()
        if self.collate_fn is not None:
            columns = [name for name in self.needed_columns if name != self.sample_weight_col]
        if columns:
            return {**self.text_cols, **dict.fromkeys(columns, "any")}
        return self.transformation is not None or self.text_cols

    @cached_property
    def transformation(self) -> Transformation | None:
        """The readers' transformation of rows, or None if there is none."""
        weight = [self.sample_weight_col] if self.sample_weight_col else []
        needed = (*self.inputs.columns, *self.label_cols, *weight)
        transformation = make_transformation(self.get, needed, tuple(self.text_cols))
        if transformation is None:
            return None
        inputs = self.inputs if self.inputs.matrices else None
        return replace(transformation, inputs=inputs, all_needed=self.needs_all_columns)

    @cached_property
    def collate(self) -> Collate | None:
        """The maker of batches of rows of any length, or None for arrays by column."""
        return make_collate(self.get, self.inputs, self.sample_weight_col)

    @property
    def function_of_rows(self) -> str | None:
        """The param whose function makes or changes rows while they are read, or None."""
        names = ("transformation_batch_fn", "transformation_fn", "collate_fn")
        return next((name for name in names if self.get(name) is not None), None)

    @property
    def collate_of_ranks(self) -> BoundedCollate | Collate | None:
        """The maker of the batches that ranks train on."""
        return self.collate

    @property
    def makes_values(self) -> bool:
        """True if functions of the user make the numbers that the model gets."""
        collate = self.collate
        return self.transformation is not None or (collate is not None and collate.takes_nulls)

    def delivered(self, columns: Columns) -> Any:
        """Return trial rows in the form in which the ranks' readers deliver them.

        Raises
        ------
        ParamError
            If the collate function fails.
        """
        if self.collate is None:
            return columns
        rows: Any = columns[ROWS]
        try:
            return self.collate(rows)
        except HvdEstimatorsError:
            raise
        except Exception as error:
            raise ParamError(
                f"collate_fn failed on the first rows with {type(error).__name__}: {error}. It "
                "gets a list of dicts with the values of "
                f"{', '.join(rows.table.column_names)}. dry_run=False leaves out this trial on "
                "the driver."
            ) from error

    def columns_read(self, columns: Sequence[ColumnSpec]) -> tuple[ColumnSpec, ...]:
        """Return columns as the readers deliver them.

        Matrices are read as such, unless a transformation takes their columns and stacks them.
        """
        if self.collate is not None:
            return (JoinedSpec(ROWS, "rows", "object", members=tuple(columns)),)
        return tuple(columns) if self.transformation else self.inputs.specs(columns)

    @property
    def reads_itself(self) -> bool:
        """True if the user's data module makes the batches, and may validate."""
        return False

    @property
    def metric_names(self) -> list[str] | None:
        """Names of the training metrics, or None if only the ranks know them."""
        return None

    @property
    def selecting_callbacks(self) -> Sequence[Any]:
        """Callbacks, the first of which with a monitor may select an epoch."""
        return self.callbacks

    @property
    def monitors(self) -> list[tuple[str, str | None]]:
        """Pairs of a setting, for messages, and its metric or None for a default one."""
        return [("checkpoint_monitor", self.checkpoint_monitor)]

    @property
    def rank_environment(self) -> Mapping[str, str | None]:
        """Environment variables of the ranks; None removes a variable."""
        return {}

    @property
    def has_own_tensorboard(self) -> bool:
        """True if a callback of the user writes losses and metrics for TensorBoard."""
        return False

    def kind_of_loss(self, shape: tuple[int | None, ...] | None) -> str | None:
        """Return the value of ``outputs_are`` that follows from the loss; None if none does.

        ``shape`` is the shape of a row of the only output, or None if it is not known yet.
        """
        return None

    def kind_of_outputs(self, shape: tuple[int | None, ...] | None) -> str | None:
        """Return ``outputs_are`` for an output of this shape, or None if it is unknown.

        The user sets it, or the loss tells it. The shape is None if it is not known yet.
        """
        told = None if self.upstream_names else self.kind_of_loss(shape)
        return resolve_kind(self.outputs_are, told)

    @property
    def class_columns(self) -> dict[str, str]:
        """The columns of a classifier that are requested: content to column name."""
        return class_columns(self.get)

    def name_param(self, error: HvdEstimatorsError) -> None:
        """Let an error name the param that a column comes from, as the user has set it."""
        columns = {name: self._columns_of(name) for name in _COLUMNS}
        param = error.param
        if param is None:
            param = next((name for name in _COLUMNS if error.column in columns[name]), None)
        if param is None:
            return
        error.param = self.other_names.get(param, param)
        if param not in self.given and error.column in columns.get(param, ()):
            error.default = ", ".join(columns[param])
            # Another column does not repair the values of this one.
            if isinstance(error, ColumnError):
                without = ", or [] to train without labels" if param == "label_cols" else ""
                error.add_remedy(f"Set {param}{without}.")

    def _columns_of(self, param: str) -> Sequence[str]:
        given = self.values[param] or []
        return [given] if isinstance(given, str) else InputColumns.of(given).columns
