"""Declarations of Spark ML params: name, default, conversion, checks and documentation.

A class derived from `DeclaredParams` declares a param as ``name = param(...)``. This line creates
the Spark Param, its getter and its setter. All converters raise `ParamError` for values that they
reject. Runs on the driver.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pyspark.ml.param import Param, Params
from pyspark.ml.util import Identifiable
from pyspark.sql.types import DataType

from hvd_estimators._util.documents import to_python
from hvd_estimators.data.inputs import MATRIX_NAME, InputColumns
from hvd_estimators.exceptions import ParamError, did_you_mean

Converter = Callable[[str, Any], Any]
"""``convert(name, value)``, whose annotations are the types that a param accepts and holds.

A `value` that is annotated as Any means the type of the result.
"""


def integer(minimum: int | None = None) -> Converter:
    """Return a converter to an integer, optionally with a minimum."""

    def convert(name: str, value: Any) -> int:
        if isinstance(value, bool) or int(value) != value:
            raise ParamError(f"{name}: expected a whole number, found {value!r}.")
        if minimum is not None and value < minimum:
            raise ParamError(f"{name}: expected {minimum} or more, found {value!r}.")
        return int(value)

    return _guarded(convert, "a whole number")


def number(minimum: float | None = None) -> Converter:
    """Return a converter to a finite float, optionally with a minimum."""

    def convert(name: str, value: Any) -> float:
        if isinstance(value, bool):
            raise ParamError(f"{name}: expected a number, found {value!r}.")
        if minimum is not None and value < minimum:
            raise ParamError(f"{name}: expected {minimum} or more, found {value!r}.")
        if not math.isfinite(float(value)):
            raise ParamError(f"{name}: expected a finite number, found {value!r}.")
        return float(value)

    return _guarded(convert, "a number")


def boolean(name: str, value: Any) -> bool:
    """Accept True and False."""
    if not isinstance(value, bool):
        raise ParamError(f"{name}: expected True or False, found {value!r}.")
    return value


def string(name: str, value: Any) -> str:
    """Accept a string."""
    if not isinstance(value, str):
        raise ParamError(f"{name}: expected a string, found {value!r}.")
    return value


def column_names(name: str, value: str | Iterable[str]) -> list[str]:
    """Accept a list of column names, or a single name."""
    values = _ordered(name, value, "a list of column names")
    for entry in values:
        if not isinstance(entry, str):
            raise ParamError(f"{name}: expected names of columns, found {entry!r}.")
    repeated = sorted(entry for entry, count in Counter(values).items() if count > 1)
    if repeated:
        raise ParamError(f"{name}: found {', '.join(map(repr, repeated))} more than once.")
    return values


def input_columns(
    name: str, value: str | Iterable[str | Iterable[str] | Mapping[str, Iterable[str]]]
) -> list[str | list[str] | dict[str, list[str]]]:
    """Accept a list of inputs: a column, a list of columns, or a dict of a name to such a list."""
    entries = _ordered(name, value, "a list of column names")
    values = [_input(name, entry) for entry in entries]
    column_names(name, [c for value in values for c in InputColumns.of([value]).columns])
    inputs = InputColumns.of(values)
    if len(inputs.by_name) < len(values) or any(m in inputs.columns for m in inputs.matrices):
        raise ParamError(
            f"{name}: expected inputs with different names, found {value!r}. Name a list of "
            f"columns by a dict, such as {{'numbers': ['a', 'b']}}; without a name it is "
            f"{MATRIX_NAME!r}."
        )
    return values


def _input(name: str, entry: Any) -> str | list[str] | dict[str, list[str]]:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((key, columns),) = entry.items()
        if isinstance(key, str) and (named := column_names(name, columns)):
            return {key: named}
    elif isinstance(entry, Iterable) and (columns := column_names(name, entry)):
        return columns
    raise ParamError(
        f"{name}: expected names of columns, found {entry!r}. An entry is a name, a list of names, "
        "or a dict of one name to such a list."
    )


def output_keys(name: str, value: int | str | Iterable[int | str]) -> list[int | str]:
    """Accept a list of positions and names, or a single one."""
    values = _ordered(name, value, "a list")
    for entry in values:
        is_position = isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0
        if not is_position and not isinstance(entry, str):
            raise ParamError(
                f"{name}: expected positions (0 or more) or names of outputs, found {entry!r}."
            )
    if not values or len(set(values)) < len(values):
        raise ParamError(f"{name}: expected one or more different outputs, found {value!r}.")
    return values


def _ordered(name: str, value: Any, expected: str) -> list[Any]:
    """Return the entries of an ordered iterable, or a list with a single string or number."""
    if isinstance(value, (Set, Mapping)):
        # The order of a set differs between processes.
        raise ParamError(f"{name}: expected {expected}, whose order counts, found {value!r}.")
    is_single = isinstance(value, str) or not isinstance(value, Iterable)
    return [value] if is_single else list(value)


def type_names(
    name: str,
    value: str | DataType | type[DataType] | Sequence[str | DataType | type[DataType] | None],
) -> list[str | None]:
    """Accept a list of Spark types as DDL strings, type objects or None, or a single one."""
    names: list[str | None] = []
    for entry in _as_list(value):
        entry = entry() if isinstance(entry, type) else entry
        described = getattr(entry, "simpleString", None)
        if not (entry is None or isinstance(entry, str) or callable(described)):
            raise ParamError(
                f"{name}: expected types as 'double' or 'array<float>', found {entry!r}."
            )
        names.append(described() if callable(described) else entry)
    return names


def numbers(name: str, value: float | Sequence[float] | NDArray[Any]) -> list[float]:
    """Accept a list of numbers, or a single number."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    convert = number()
    return [convert(name, entry) for entry in _as_list(value)]


def functions(
    name: str, value: Callable[..., Any] | Sequence[Callable[..., Any]]
) -> list[Callable[..., Any]]:
    """Accept a list of callables, or a single callable."""
    values = _as_list(value)
    for entry in values:
        if not callable(entry):
            raise ParamError(f"{name}: expected callables, found {entry!r}.")
    return values


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def keyword_arguments(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Accept a dict of keyword arguments."""
    is_dict = isinstance(value, Mapping)
    if not is_dict or not all(isinstance(key, str) for key in value):
        raise ParamError(f"{name}: expected a dict of keyword arguments, found {value!r}.")
    return dict(value)


def objects(name: str, value: Iterable[Any]) -> list[Any]:
    """Accept a list of objects, or another ordered iterable of objects."""
    if isinstance(value, (str, bytes, Set, Mapping)) or not isinstance(value, Iterable):
        raise ParamError(
            f"{name}: expected a list, found {value!r}. Wrap a single value: [{value!r}]."
        )
    return list(value)


def one_of(*choices: str) -> Converter:
    """Return a converter that accepts only the given strings."""

    def convert(name: str, value: Any) -> str:
        if value not in choices:
            raise ParamError(
                f"{name}: expected one of {', '.join(map(repr, choices))}, found {value!r}."
            )
        return str(value)

    convert.__annotations__["return"] = f"Literal[{', '.join(map(repr, choices))}]"
    return convert


def shapes(name: str, value: Iterable[Iterable[int]]) -> list[list[int]]:
    """Accept a list of row shapes, or of batch shapes with -1 as the first dimension.

    Returns the shapes with the -1: ``[2]`` and ``[-1, 2]`` are the same, and so are ``[]`` (a
    number per row) and ``[-1]``.
    """
    try:
        if isinstance(value, (Set, Mapping)):
            raise TypeError("no order")
        given = [[operator.index(size) for size in shape] for shape in value]
    except TypeError:
        given = [[0]]
    converted = [shape if shape[:1] == [-1] else [-1, *shape] for shape in given]
    for _, *row in converted:
        if any(size < 1 and size != -1 for size in row) or row.count(-1) > 1:
            raise ParamError(
                f"{name}: expected a list of shapes, of one row each, such as [[8]], or with -1 "
                f"for the rows of a batch first, such as [[-1, 8]], found {value!r}."
            )
    return converted


def _guarded(convert: Converter, expected: str) -> Converter:
    @functools.wraps(convert)
    def guarded(name: str, value: Any) -> Any:
        try:
            return convert(name, value)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, ParamError):
                raise
            raise ParamError(f"{name}: expected {expected}, found {value!r}.") from None

    return guarded


class param:
    """Declaration of one param, with everything that is known about it.

    Parameters
    ----------
    doc : str
        Its meaning, for ``explainParams()`` and the class's docstring.
    default : object
        Value if none is set; an explicit None also selects the default.
    convert : callable, optional
        ``convert(name, value)`` returns the value to store, or raises `ParamError`.
    accessor : str, optional
        Suffix of the ``get`` and ``set`` methods. Default: the name in camel case.
    aliases : iterable of str
        Additional accessors, which other packages are known to call.
    saved : bool
        Whether its value is saved with the object.
    stands_for : str, optional
        The param that this one is another name of. A value set by one name can be read by both.
    type : str, optional
        Type of its values, as an annotation. Default: the types of the converter's annotations.
    fitted : bool
        Whether `fit` sets it in each model, so that the getter's type is without None.
    """

    def __init__(
        self,
        doc: str,
        default: Any = None,
        convert: Converter | None = None,
        accessor: str | None = None,
        aliases: Iterable[str] = (),
        saved: bool = True,
        stands_for: str | None = None,
        type: str | None = None,
        fitted: bool = False,
    ) -> None:
        self.doc = doc
        self.default = default
        self.convert = convert
        self.accessor = accessor
        self.aliases = tuple(aliases)
        self.saved = saved
        self.stands_for = stands_for
        self.fitted = fitted
        hints = {
            key: each if isinstance(each, str) else inspect.formatannotation(each)
            for key, each in getattr(convert, "__annotations__", {}).items()
        }
        self.type = type or hints.get("return", "Any")
        accepted = type or hints.get("value", "Any")
        self.accepted_type = self.type if accepted == "Any" else accepted

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: object) -> Param[Any]: ...

    @property
    def setter_type(self) -> str:
        """Type of the values to set; None restores the default."""
        return _optional(self.accepted_type)

    @property
    def getter_type(self) -> str:
        """Type of the values to read."""
        return _optional(self.type) if self.default is None and not self.fitted else self.type

    def accessors(self, name: str) -> list[str]:
        """Return the suffixes of its ``get`` and ``set`` methods."""
        own = self.accessor or "".join(part.capitalize() for part in name.split("_"))
        return [own, *self.aliases]


def _optional(type: str) -> str:
    return type if type == "Any" or type.endswith("| None") else f"{type} | None"


def narrowed(cls: type[DeclaredParams], name: str, type: str) -> param:
    """Return a declaration for a subclass of `cls` whose framework has a narrower type."""
    declaration = copy.copy(cls._declarations[name])
    declaration.type = declaration.accepted_type = type
    return declaration


class _ClassLevel(Identifiable):
    """Parent of a Param that is accessed on the class: ``TorchEstimator.epochs``."""

    def __init__(self) -> None:
        self.uid = "undefined"  # as in Spark's own classes


_CLASS_LEVEL = _ClassLevel()


class DeclaredParams(Params):
    """Base class for classes that declare their params with `param`."""

    _declarations: ClassVar[dict[str, param]] = {}
    _described_first: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, param)}
        inherited = [getattr(base, "_declarations", {}) for base in reversed(cls.__mro__[1:])]
        cls._declarations = {k: v for group in [*inherited, declared] for k, v in group.items()}
        for name, declaration in declared.items():
            _install(cls, name, declaration)
        _prefer_others(cls)
        if "__init__" in vars(cls) or declared or vars(cls).get("__doc__"):
            _describe(cls)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**{name: to_python(d.default) for name, d in self._declarations.items()})
        for name in self._declarations:
            self.getParam(name).typeConverter = functools.partial(_in_grid, type(self), name)

    def setParams(self, **kwargs: Any) -> Self:
        """Set several params by name.

        Raises
        ------
        ParamError
            If there is no param of that name, or a value is rejected.
        """
        return self._set(**kwargs)

    def set(self, param: Param[Any], value: Any) -> None:
        """Set a param of this object, as `setParams` does. Spark ML's readers call this method.

        Raises
        ------
        ParamError
            If the value is rejected, or the param belongs to another object.
        """
        if param.parent != self.uid or not self.hasParam(param.name):
            raise ParamError(f"{param.name}: {param} does not belong to {self}. Set its own.")
        self._set(**{param.name: value})

    def _set(self, **kwargs: Any) -> Self:
        for name, value in kwargs.items():
            if not self.hasParam(name):
                hint = did_you_mean(name, self._declarations)
                raise ParamError(f"{type(self).__name__} has no parameter {name!r}.{hint}")
            if value is None:
                self.clear(self.getParam(name))
                continue
            value = to_python(value)
            if name in self._declarations:
                self._store_value(name, self._converted(name, value))
                continue
            # A Param that a subclass defines in the style of Spark's own classes.
            try:
                super().set(self.getParam(name), value)
            except (TypeError, ValueError) as error:
                raise ParamError(f"{name}: {error}") from error
        return self

    def _store_value(self, name: str, value: Any) -> None:
        """Set a param to a value that was converted before."""
        # Spark would call the param's converter, which is for values of a grid.
        super().set(Param(self, name, self.getParam(name).doc), value)

    def _values(self) -> dict[str, Any]:
        """Return the values that are set, by name."""
        return {p.name: Params.getOrDefault(self, p) for p in self.params if self.isSet(p)}

    def _defaults(self) -> dict[str, Any]:
        """Return the default values, by name."""
        bare = super().copy()
        for param in bare.params:
            bare.clear(param)
        return {p.name: bare.getOrDefault(p) for p in bare.params if bare.hasDefault(p)}

    def getOrDefault(self, param: Any) -> Any:
        """Return a param's value, set by any of its names, or its default.

        Lists and dicts are copies, so changes to them do not affect the param.
        """
        return to_python(self._value_or_default(param))

    def _value_or_default(self, param: Any) -> Any:
        name = param if isinstance(param, str) else param.name
        if name in self._declarations and not self.isSet(name):
            for other, target in self._other_names():
                if name == target and self.isSet(other):
                    return self._converted(target, super().getOrDefault(other))
                if name == other and self.isSet(target):
                    value = super().getOrDefault(target)
                    if not isinstance(value, list):
                        return value
                    is_single = len(value) == 1 and isinstance(value[0], str)
                    return value[0] if is_single else None
        return super().getOrDefault(param)

    def _is_given(self, name: str) -> bool:
        """Return whether a param is set, by any of its names."""
        others = [other for other, target in self._other_names() if target == name]
        return any(self.isSet(spelling) for spelling in (name, *others))

    def _check_other_names(self) -> None:
        """Check that two names of the same param have the same value.

        Raises
        ------
        ParamError
            If the values differ.
        """
        for other, target in self._other_names():
            if not (self.isSet(other) and self.isSet(target)):
                continue
            given, meant = super().getOrDefault(other), super().getOrDefault(target)
            if self._converted(target, given) != meant:
                raise ParamError(
                    f"{other}={given!r} and {target}={meant!r} are two names of one parameter. "
                    "Set one of them."
                )

    def _names_as_set(self) -> dict[str, str]:
        """Return the names by which params were set, for messages: featuresCol for feature_cols."""
        return {
            target: other
            for other, target in self._other_names()
            if self.isSet(other) and not self.isSet(target)
        }

    def _other_names(self) -> list[tuple[str, str]]:
        return [(n, d.stands_for) for n, d in self._declarations.items() if d.stands_for]

    def _converted(self, name: str, value: Any) -> Any:
        convert = self._declarations[name].convert
        return value if convert is None else convert(name, value)

    def _takes_of_class(self, name: str) -> bool:
        # A grid of networks, for example, does not replace the trained one.
        return name in self._declarations and not self._declarations[name].fitted

    def copy(self, extra: Any = None) -> Self:
        """Return a copy with some values replaced.

        Parameters
        ----------
        extra : dict, optional
            Param (or its name) to value. Params of other objects are ignored, as in Spark: a
            pipeline passes one dict to all stages, and a fitted model receives its estimator's
            dict. If a param has two names, the name in ``extra`` replaces the value of the other
            name.
        """
        values = {
            key if isinstance(key, str) else key.name: value
            for key, value in (extra or {}).items()
            if isinstance(key, str)
            or key.parent == self.uid
            # Of a class, in a grid whose dict a fitted model receives, too.
            or (key.parent == _CLASS_LEVEL.uid and self._takes_of_class(key.name))
        }
        copied = super().copy()
        for pair in self._other_names():
            # Code that uses Spark's names, such as OneVsRest, must override values set by this
            # package's names.
            for name, other in (pair, pair[::-1]):
                if values.get(name) is not None and other not in values:
                    copied.clear(copied.getParam(other))
        return copied._set(**values)


def _in_grid(cls: type[DeclaredParams], name: str, value: Any) -> Any:
    """Check a value of a grid when ``ParamGridBuilder`` builds it, before the first fit."""
    value = to_python(value)
    convert = cls._declarations[name].convert
    if convert is not None and value is not None:
        convert(name, value)
    return value


class _Annotation(str):
    """Type in a signature, which help() shows without quotes."""

    __repr__ = str.__str__


def _install(cls: type[DeclaredParams], name: str, declaration: param) -> None:
    setattr(cls, name, Param(_CLASS_LEVEL, name, declaration.doc))

    def getter(self: DeclaredParams) -> Any:
        return self.getOrDefault(self.getParam(name))

    def setter(self: DeclaredParams, value: Any) -> DeclaredParams:
        return self._set(**{name: value})

    getter.is_declared = setter.is_declared = True  # type: ignore[attr-defined]
    getter.__doc__ = f"Return ``{name}``: {declaration.doc}"
    setter.__doc__ = f"Set ``{name}``: {declaration.doc}"
    getter.__annotations__ = {"return": _Annotation(declaration.getter_type)}
    setter.__annotations__ = {"value": _Annotation(declaration.setter_type), "return": Self}
    for prefix, function in (("get", getter), ("set", setter)):
        suffixes = declaration.accessors(name)
        function.__name__ = f"{prefix}{suffixes[0]}"
        function.__qualname__ = f"{cls.__qualname__}.{function.__name__}"
        for suffix in suffixes:
            if f"{prefix}{suffix}" not in vars(cls):
                setattr(cls, f"{prefix}{suffix}", function)


def _prefer_others(cls: type[DeclaredParams]) -> None:
    """Prefer accessors of a subclass's other bases to declared accessors of the same name.

    Other packages define params such as ``label_col`` in mixins, beside this package's
    ``labelCol``. These mixins follow this package's classes among the bases and do not know this
    package.
    """
    for base in cls.__mro__[1:]:
        if issubclass(base, DeclaredParams) or base.__module__.partition(".")[0] == "pyspark":
            continue
        for name, accessor in vars(base).items():
            if name.startswith(("get", "set")) and callable(accessor):
                ours = inspect.getattr_static(cls, name, None)
                if getattr(ours, "is_declared", False):
                    setattr(cls, name, accessor)


def _describe(cls: type[DeclaredParams]) -> None:
    """Generate the constructor's signature and the Parameters section from the declarations."""
    init = inspect.signature(cls.__init__)
    if not any(p.kind is p.VAR_KEYWORD for p in init.parameters.values()):
        # Use a user-defined constructor's own signature, not the inherited one.
        own = list(init.parameters.values())[1:]
        cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return
    first = {n: cls._declarations[n] for n in cls._described_first if n in cls._declarations}
    described = {**first, **cls._declarations}
    keyword = inspect.Parameter.KEYWORD_ONLY
    cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, keyword, default=d.default, annotation=_Annotation(d.setter_type)
            )
            for name, d in described.items()
        ]
    )
    lines = ["", "", "Parameters", "----------"]
    for name, d in described.items():
        accepted = "object" if d.accepted_type == "Any" else d.accepted_type
        lines += [f"{name} : {accepted}, default {d.default!r}", f"    {d.doc}"]
    cls.__doc__ = inspect.cleandoc(cls.__doc__ or "") + "\n".join(lines)
