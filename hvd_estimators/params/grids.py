"""Param grids with values that JSON cannot represent, such as optimizers. Runs on the driver.

Spark saves a validator's grid values as JSON. Estimators, transformers and evaluators are saved as
separate files. A grid therefore wraps other values in a `GridValue`, which is an evaluator by type
only. An estimator unwraps the `GridValue` when the param is set.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Self, TypeVar

from pyspark.ml.evaluation import Evaluator
from pyspark.ml.util import MLWriter
from pyspark.sql import DataFrame

from hvd_estimators._util.documents import to_python
from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import DeclaredParams, param
from hvd_estimators.saving.save import FileReadable, FileWritable, dump_param, is_json

Known = TypeVar("Known")

# An optimizer is saved with the names of its model's parameters, so the value's owner must be
# known. Loaded estimators have the uid of the saved estimator.
_estimators: weakref.WeakValueDictionary[int, GridParams] = weakref.WeakValueDictionary()
# The model may itself be a grid value. The keys are ids, since a set cannot be iterated while other
# threads add to it.
_models: weakref.WeakValueDictionary[int, GridValue] = weakref.WeakValueDictionary()


class GridValue(Evaluator, DeclaredParams, FileWritable, FileReadable):
    """Wrapper of a param's value in a grid.

    `value` is the original grid value. A loaded value is available only through the estimator that
    it is set in: ``estimator.copy(param_map).getOptimizer()``.
    """

    param_name = param("Name of the param whose value it is.")
    document = param("The value, as the estimator saves it.")

    def __init__(self, owner: str = "", name: str | None = None, value: Any = None) -> None:
        super().__init__()
        self._set(param_name=name)
        self._owner = owner
        self.value = value
        self._know()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._know()

    def _know(self) -> None:
        if self.isSet("param_name") and self.getOrDefault("param_name") == "model":
            _models[id(self)] = self

    def value_for(self, estimator: GridParams) -> Any:
        """Return the value, bound to an estimator's model if the value was loaded."""
        document = self.getOrDefault("document")
        if document is None:
            return self.value
        name = self.getOrDefault("param_name")
        return estimator._load_params({name: document})[name]

    def write(self) -> MLWriter:
        """Return a writer."""
        if self.isSet("document"):
            return super().write()
        name = self.getOrDefault("param_name")
        # Copies of the estimator share its uid and may have another model.
        estimators = [each for each in _alive(_estimators) if each.uid == self._owner]
        if not estimators:
            raise ParamError(
                f"{name}: the estimator for which the grid was built no longer exists, so its "
                "values cannot be saved. Keep it, or rebuild the grid."
            )
        return self.copy({"document": self._dumped(estimators, name)}).write()

    def _dumped(self, estimators: list[GridParams], name: str) -> bytes:
        """Serialize the value as an estimator does, with its own model or one from the grid."""
        estimator, *copies = estimators
        try:
            return dump_param(estimator, name, self.value)
        except ParamError:
            for copied in copies:
                with contextlib.suppress(ParamError):
                    return dump_param(copied, name, self.value)
            for model in _alive(_models):
                if model._owner != self._owner:
                    continue
                candidate = estimator.copy()
                candidate._store_value("model", model.value)
                with contextlib.suppress(ParamError):
                    return dump_param(candidate, name, self.value)
            raise

    def _evaluate(self, dataset: DataFrame) -> float:
        raise NotImplementedError("A value of a grid cannot evaluate a DataFrame.")

    def __repr__(self) -> str:
        shown = "loaded" if self.isSet("document") else repr(self.value)
        return f"GridValue({self.getOrDefault('param_name')}={shown})"


class GridParams(DeclaredParams, FileWritable, FileReadable):
    """Params whose values in a ``ParamGridBuilder`` can be saved with Spark's validators."""

    def __init__(self) -> None:
        super().__init__()
        self._own_grids()

    def _resetUid(self, newUid: Any) -> Self:
        super()._resetUid(newUid)
        self._own_grids()
        return self

    def _own_grids(self) -> None:
        _estimators[id(self)] = self
        for name in self._declarations:
            # ParamGridBuilder calls the converter for each value.
            converter = functools.partial(_in_grid, type(self), self.uid, name)
            self.getParam(name).typeConverter = converter

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies and unpickled objects are created without the constructor.
        self.__dict__.update(state)
        _estimators[id(self)] = self

    def _set(self, **kwargs: Any) -> Self:
        # Set the model first, since an optimizer is bound to it.
        for name in sorted(kwargs, key=lambda name: name != "model"):
            value = kwargs[name]
            super()._set(**{name: value.value_for(self) if isinstance(value, GridValue) else value})
        return self


def _alive(references: weakref.WeakValueDictionary[int, Known]) -> list[Known]:
    return [value for reference in references.valuerefs() if (value := reference()) is not None]


def _in_grid(cls: type[GridParams], owner: str, name: str, value: Any) -> Any:
    value = to_python(value)
    if isinstance(value, GridValue):
        return value
    convert = cls._declarations[name].convert
    if convert is not None and value is not None:
        convert(name, value)  # reject invalid values before the first fit
    if is_json(value):
        return value
    return GridValue(owner, name, value)
