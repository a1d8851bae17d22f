"""Columns of DataFrames as columns of Parquet: names, types, ML attributes, expressions.

ML attributes are read from a column's metadata, in the format of Spark's
``org.apache.spark.ml.attribute``. Runs on the driver, and starts no Spark job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from typing_extensions import TypeIs

from hvd_estimators._util.spark_session import is_stopped
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.types import DENSE, SPARK_DTYPES, TextColumns, decimal_dtype, text_options
from hvd_estimators.exceptions import ColumnError, ParamError, did_you_mean, listed


def quoted(name: str) -> str:
    """Return a column's name quoted for Spark's functions, preserving dots and backticks."""
    return "`" + name.replace("`", "``") + "`"


def fields_by_name(df: DataFrame) -> dict[str, T.StructField]:
    """Return the fields of a DataFrame's schema; its own look-up by name tries each field."""
    return {field.name: field for field in df.schema}


def unused_name(name: str, used_names: Iterable[str]) -> str:
    """Return a name that is not taken, ignoring case: the given one or a similar one."""
    folded = {used.casefold() for used in used_names}
    while name.casefold() in folded:
        name += "_"
    return name


def clashing(df: DataFrame, name: str, names: Sequence[str]) -> list[str]:
    """Return the names of a list that Spark considers equal to a name."""
    key = _key_of_names(df)
    wanted = key(name)
    return [candidate for candidate in names if key(candidate) == wanted]


def columns_alike(df: DataFrame) -> dict[str, list[str]]:
    """Return for each column the columns whose names Spark considers equal to its name."""
    key = _key_of_names(df)
    groups: dict[str, list[str]] = {}
    for name in df.columns:
        groups.setdefault(key(name), []).append(name)
    return {name: group for group in groups.values() for name in group}


def _key_of_names(df: DataFrame) -> Callable[[str], str]:
    """Return a function that returns equal keys for names that Spark considers equal."""
    if str(df.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true":
        return str
    return _folded


def _folded(name: str) -> str:
    """Return a name's key for Spark's resolver, which compares names with equalsIgnoreCase.

    Python's casefold differs: it converts "ß" to "ss", and preserves the Turkish dotless i.
    """
    if name.isascii():
        return name.lower()
    return "".join(_lower(_upper(character)) for character in name)


def _upper(character: str) -> str:
    upper = character.upper()
    return upper if len(upper) == 1 else character


def _lower(character: str) -> str:
    # One capital letter, the Turkish İ, becomes two characters. Java uses the first.
    return character.lower()[0]


def is_frame(given: Any) -> TypeIs[DataFrame]:
    """Return whether a value is a Spark DataFrame, also one of Spark Connect."""
    return isinstance(given, DataFrame) or hasattr(given, "sparkSession")


def require_frame(param: str, given: Any, *, allow_stream: bool = False) -> None:
    """Check that a parameter is a Spark DataFrame whose rows can be read.

    Raises
    ------
    ParamError
        If it is not, if its session was stopped, or if it is a stream without ``allow_stream``.
    DependencyError
        If its session is a Spark Connect session, and this PySpark version is too old for that.
    """
    if not is_frame(given):
        type_name = f"{type(given).__module__}.{type(given).__name__}"
        raise ParamError(
            f"{param}: expected a pyspark.sql.DataFrame, found {type_name}. Make one with "
            "spark.createDataFrame(...) or spark.read."
        )
    if is_stopped(given.sparkSession):
        raise ParamError(
            f"{param}: found a DataFrame of a Spark session that was stopped. Start a session with "
            "SparkSession.builder.getOrCreate(), and make the DataFrame in it."
        )
    if not allow_stream and given.isStreaming:
        raise ParamError(
            f"{param}: found a stream, which has no end. Pass rows that spark.read or spark.table "
            "returns, or the DataFrame of each batch, within foreachBatch."
        )


def require_columns(df: DataFrame, param: str, names: Sequence[str]) -> None:
    """Check that a parameter names columns that exist and are unambiguous.

    Raises
    ------
    ColumnError
        If no names are given, if a column is missing, or if a name matches several columns.
    """
    if not names:
        raise ColumnError(
            "expected at least one column name, found none.", param=param, remedy=f"Set {param}."
        )
    alike_columns = columns_alike(df)
    missing = [name for name in names if name not in alike_columns]
    if missing:
        raise ColumnError(
            f"the DataFrame has no column {listed(map(repr, missing))}; "
            f"its columns are {listed(df.columns)}.{_in_other_case(df, missing[0])}",
            param=param,
            column=missing[0],
        )
    for name in names:
        alike = alike_columns[name]
        if len(alike) > 1:
            remedy = "Rename or drop the others (toDF renames by position)"
            if len(set(alike)) > 1:
                remedy += ", or set spark.sql.caseSensitive=true, if case tells them apart"
            raise ColumnError(
                f"the DataFrame has {len(alike)} columns that Spark takes for "
                f"{name!r}: {', '.join(map(repr, alike))}.",
                param=param,
                column=name,
                remedy=f"{remedy}.",
            )


def _in_other_case(df: DataFrame, name: str) -> str:
    """Return a hint for a missing name that Spark itself would resolve, or a similar name."""
    alike = clashing(df, name, df.columns)
    if alike:
        return f" Write {alike[0]!r}: upper and lower case must be as in the DataFrame."
    return did_you_mean(name, df.columns)


def cardinalities(df: DataFrame, columns: Sequence[str]) -> dict[str, int]:
    """Return the number of values of category-index columns, for the size of embeddings.

    Runs on the driver, and starts no Spark job: ``pyspark.ml`` transformers record the number in a
    column's metadata.

    Parameters
    ----------
    df : DataFrame
        Output of ``StringIndexer``, ``Bucketizer``, ``QuantileDiscretizer`` or another transformer
        of ``pyspark.ml``.
    columns : sequence of str
        Columns of indices, from 0.

    Returns
    -------
    dict of str to int
        The number of values of each column, in the given order. ``handleInvalid="keep"`` of
        ``StringIndexer`` adds one, for unseen values. ``handleInvalid="keep"`` of ``Bucketizer``
        and ``QuantileDiscretizer`` adds a bucket for NaN, but Spark does not record it: add one
        yourself.

    Raises
    ------
    ColumnError
        If a column does not exist, or if its metadata does not contain the number of values.
    ParamError
        If ``df`` is not a DataFrame.

    Examples
    --------
    >>> indexed = StringIndexer(inputCol="store", outputCol="store_index").fit(df).transform(df)
    >>> sizes = cardinalities(indexed, ["store_index"])
    >>> embedding = torch.nn.Embedding(sizes["store_index"], 8)
    """
    require_frame("df", df, allow_stream=True)
    if isinstance(columns, str):
        columns = [columns]
    require_columns(df, "columns", columns)
    fields = fields_by_name(df)
    return {name: _cardinality(fields[name]) for name in columns}


def vector_width(field: T.StructField) -> int | None:
    """Return the width of a vector column if an ML transformer recorded it, or None."""
    width = _noted(field).get("num_attrs")
    return int(width) if width else None


def _cardinality(field: T.StructField) -> int:
    noted, name = _noted(field), field.name
    if "vals" in noted:
        return len(noted["vals"])
    if "num_vals" in noted:
        return int(noted["num_vals"])
    if noted.get("type") == "binary":
        return 2
    if "attrs" in noted or "num_attrs" in noted:
        raise ColumnError(
            f"columns: {name!r} is a vector, found {noted.get('num_attrs', 'several')} numbers in "
            "it. Name the columns that it was assembled of."
        )
    raise ColumnError(
        f"columns: expected a column of category indices, but nothing notes how many values "
        f"{name!r} has. Write it with pyspark.ml's StringIndexer, or count them: "
        f"df.agg(F.max({name!r})).first()[0] + 1."
    )


def _noted(field: T.StructField) -> Mapping[str, Any]:
    noted: Mapping[str, Any] = field.metadata.get("ml_attr", {})
    return noted


_TEXT = (T.StringType, T.CharType, T.VarcharType)

_INDEX = "index it with pyspark.ml.feature.StringIndexer, or leave it out"

_OF_TIMESTAMPS = "turn it into a number, for example with unix_timestamp"


# By name, because some PySpark versions lack some of these types.
_REMEDIES = {
    "StringType": _INDEX,
    "CharType": _INDEX,
    "VarcharType": _INDEX,
    "BinaryType": "decode it to an array of numbers, before or in a transformation_fn",
    "DateType": "turn it into a number, for example with datediff or dayofyear",
    "TimestampType": _OF_TIMESTAMPS,
    "TimestampNTZType": _OF_TIMESTAMPS,
    "TimeType": "turn it into a number, for example with hour and minute",
    "DayTimeIntervalType": (
        "turn it into a number of its smallest unit, for example of seconds with "
        "cast('decimal(20,6)')"
    ),
    "YearMonthIntervalType": "turn it into a number of months, with cast('int')",
    "CalendarIntervalType": (
        "its months have no length in days: take its parts apart with extract, or the difference "
        "of two timestamps instead of it"
    ),
    "VariantType": (
        "take the numbers out that you need, with variant_get(column, '$.name', 'double')"
    ),
    "NullType": "it has no values; cast it to a numeric type, or leave it out",
    "StructType": "select its fields as separate columns, or convert it to an array",
    "MapType": "select the keys that you need as columns, or convert it to an array",
    "GeometryType": "take its coordinates apart to columns of numbers",
    "GeographyType": "take its coordinates apart to columns of numbers",
    "MatrixUDT": "convert it to an array, with a UDF that returns its toArray().tolist()",
    "UserDefinedType": "convert it to numbers or an array of them, unwrap_udt shows what it holds",
}

_OLD_VECTORS = (
    "it is one of pyspark.mllib, convert it with MLUtils.convertVectorColumnsToML(df, {name!r})"
)


@dataclass(frozen=True)
class StoredColumn:
    """Written form of a DataFrame column.

    Attributes
    ----------
    spec : ColumnSpec
        The column as readers see it; its shape is ``(-1,)`` until the rows have been measured.
    expressions : tuple of Column
        The expressions to write to Parquet as ``spec.stored_names``. Empty for a column that is
        written as it is, or cast.
    cast : str or None
        Type to which such a column is cast.
    length : Column or None
        Number of elements of a row's value; null or negative for a null. None for scalars.
    has_map : bool
        Whether values hold maps, which Spark cannot hash.
    depth : int or None
        Number of nested arrays around each number; None if it follows from the spec's shape.
    """

    spec: ColumnSpec
    expressions: tuple[Column, ...] = ()
    cast: str | None = None
    length: Column | None = None
    has_map: bool = False
    depth: int | None = None

    def is_not_finite(self, written: str) -> Column | None:
        """Return an expression over a written column: true if a row holds NaN or infinity.

        None if the type has neither, or if structs and maps hold the numbers.
        """
        if not self.spec.dtype.startswith("float"):
            return None
        condition: Callable[[Column], Column] = _is_not_finite
        for _ in range(len(self.spec.shape) if self.depth is None else self.depth):
            condition = _exists(condition)
        return condition(F.col(written))


def inner_lengths(array: Column, depth: int) -> list[Column]:
    """Return for each inner dimension of an array the lengths of its arrays, without nulls."""
    lengths = []
    for _ in range(depth - 1):
        sizes = F.transform(array, F.size)
        # The size of a null is null under ANSI rules, and -1 otherwise.
        lengths.append(F.filter(sizes, lambda size: size >= 0))
        array = F.flatten(array)
    return lengths


def numbered(
    df: DataFrame, columns: Sequence[StoredColumn], further: Sequence[Column]
) -> DataFrame:
    """Return the written form of columns, and further columns, with the names c0, c1 and so on.

    SQL selects them, because each Column of a thousand takes several calls of the JVM. The SQL does
    not contain the user's names, in which Spark would replace ``${variable}``.
    """
    # Not `DataFrame.columns`, for which newer versions of PySpark call the JVM for each name.
    given = df.schema.names
    positions = {name: position for position, name in enumerate(given)}
    computed = [expression for column in columns for expression in column.expressions]
    names = [f"c{position}" for position in range(len(given) + len(computed) + len(further))]
    frame = df.select("*", *computed, *further).toDF(*names)
    following = iter(names[len(given) :])
    sql = []
    for column in columns:
        if column.expressions:
            sql += [next(following) for _ in column.expressions]
            continue
        name = f"c{positions[column.spec.name]}"
        sql.append(f"cast({name} as {column.cast})" if column.cast else name)
    sql += following
    return frame.selectExpr(*(f"{each} as c{number}" for number, each in enumerate(sql)))


def stored_column(
    field: T.StructField,
    *,
    compress_sparse: bool = False,
    allow_text: bool = False,
    bytes_as_text: bool = True,
    allow_any: bool = False,
    used_names: Collection[str] = (),
) -> StoredColumn:
    """Return the written form of a column.

    Parameters
    ----------
    field : StructField
        The column: a vector, an array of numbers (of equal length in all rows), a number or a
        boolean. Vectors are written as 32-bit floats, and decimals as 64-bit floats. Other values
        keep their types.
    compress_sparse : bool
        Write vectors as indices and values of the nonzero elements.
    allow_text : bool
        Also accept strings and bytes.
    bytes_as_text : bool
        Whether ``allow_text`` includes bytes.
    allow_any : bool
        Also accept arrays of any length, text, bytes, dates, timestamps, structs and maps, nested
        in any way and with nulls. Only vectors change their form.
    used_names : collection of str
        Names of other written columns.

    Raises
    ------
    ColumnError
        If the type cannot be used for training.
    """
    name, data_type = field.name, field.dataType
    if allow_any:
        return _of_any_type(name, data_type)
    if isinstance(data_type, VectorUDT):
        column = F.col(quoted(name))
        return _sparse(name, column, used_names) if compress_sparse else _dense(name, column)
    if allow_text and isinstance(data_type, (*_TEXT, T.BinaryType) if bytes_as_text else _TEXT):
        return StoredColumn(ColumnSpec(name, "text", "object"))
    if isinstance(data_type, T.ArrayType):
        element, depth = _leaf(data_type)
        dtype = _dtype(name, element, data_type)
        cast, is_whole = _cast(element)
        cast = f"{'array<' * depth}{cast}{'>' * depth}" if cast else None
        spec = ColumnSpec(name, "array", dtype, (-1,) * depth, is_whole=is_whole)
        return StoredColumn(spec, cast=cast, length=F.size(quoted(name)))
    dtype, (cast, is_whole) = _dtype(name, data_type, data_type), _cast(data_type)
    return StoredColumn(ColumnSpec(name, "scalar", dtype, is_whole=is_whole), cast=cast)


def known_columns(
    df: DataFrame, names: list[str], allow_text: TextColumns = False
) -> list[ColumnSpec] | None:
    """Return the columns' specs as far as the schema determines them, without a Spark job.

    Parameters
    ----------
    df : DataFrame
        Contains the columns.
    names : list of str
        The columns.
    allow_text : bool or mapping
        Also accept text; see `text_options`.

    Returns
    -------
    list of ColumnSpec, or None
        The columns with their shapes; None if the schema does not determine all of them. The schema
        never contains the width of an array. It contains the width of a vector only if an ML
        transformer recorded it.
    """
    specs = []
    fields = fields_by_name(df)
    for name in names:
        spec = stored_column(fields[name], **text_options(allow_text, name)).spec
        if spec.kind == "any":
            return None
        if spec.shape:
            width = vector_width(fields[name])
            if spec.kind != "vector" or not width:
                return None
            spec = replace(spec, shape=(width,))
        specs.append(spec)
    return specs


def feature_array(
    field: T.StructField, allow_text: bool = False, allow_any: bool = False
) -> Column | str:
    """Return a column in the form that a model's UDF accepts: vectors as float arrays.

    A column that needs no conversion is returned as its quoted name. Python makes each object of a
    column in several calls of the JVM, which takes seconds for some thousand columns.

    Raises
    ------
    ColumnError
        If the type cannot be used for prediction.
    """
    stored = stored_column(field, allow_text=allow_text, allow_any=allow_any)
    if stored.expressions:
        return stored.expressions[0]
    name = quoted(field.name)
    return F.col(name).cast(stored.cast) if stored.cast else name


def _of_any_type(name: str, data_type: T.DataType) -> StoredColumn:
    if isinstance(data_type, VectorUDT):
        dense = _dense(name, F.col(quoted(name)))
        return StoredColumn(ColumnSpec(name, "any", "float32"), dense.expressions, depth=1)
    for leaf in _leaves(data_type):
        if not isinstance(leaf, _ANY):
            raise ColumnError(
                f"Column {name!r} has type {data_type.simpleString()}, and a collate function "
                f"takes no {leaf.simpleString()}: {_remedy(name, leaf)}.",
                column=name,
            )
    leaf, depth = _leaf(data_type) if isinstance(data_type, T.ArrayType) else (data_type, 0)
    dtype = "object"
    if isinstance(leaf, (T.NumericType, T.BooleanType)):
        dtype = _dtype(name, leaf, data_type)
    has_map = "map<" in data_type.simpleString()
    return StoredColumn(ColumnSpec(name, "any", dtype), has_map=has_map, depth=depth)


_ANY = (
    *(T.NumericType, T.BooleanType, *_TEXT, T.BinaryType),
    *(T.DateType, T.TimestampType, T.TimestampNTZType),
)
"""Types of values that functions take, besides arrays, structs and maps of these."""


def _leaves(data_type: T.DataType) -> Iterator[T.DataType]:
    """Yield the types of the values in a type."""
    if isinstance(data_type, T.ArrayType):
        yield from _leaves(data_type.elementType)
    elif isinstance(data_type, T.MapType):
        yield from _leaves(data_type.keyType)
        yield from _leaves(data_type.valueType)
    elif isinstance(data_type, T.StructType):
        for field in data_type:
            yield from _leaves(field.dataType)
    else:
        yield data_type


def _dense(name: str, column: Column) -> StoredColumn:
    raw = F.unwrap_udt(column)
    array = (
        # Dense vectors are cast without JVM objects; vector_to_array creates one per vector.
        F.when(raw["type"] == DENSE, raw["values"].cast("array<float>"))
        # vector_to_array fails on a null, and does not name the column.
        .when(column.isNotNull(), vector_to_array(column, "float32"))
    )
    spec = ColumnSpec(name, "vector", "float32", (-1,))
    return StoredColumn(spec, (array,), length=F.size(array))


def _sparse(name: str, column: Column, used_names: Collection[str]) -> StoredColumn:
    spec = ColumnSpec(name, "sparse", "float32", (-1,))
    spec = replace(spec, stored=tuple(unused_name(part, used_names) for part in spec.stored_names))
    raw = F.unwrap_udt(column)
    values = raw["values"].cast("array<float>")
    size = F.when(raw["type"] == DENSE, F.size(values)).otherwise(raw["size"])

    def pair(index: Column, value: Column) -> Column:
        return F.struct(index.alias("index"), value.alias("value"))

    of_dense = F.transform(values, lambda value, index: pair(index, value))
    of_sparse = F.zip_with(raw["indices"], values, pair)
    pairs = F.when(raw["type"] == DENSE, of_dense).otherwise(of_sparse)
    # A sparse vector may also contain zeros.
    pairs = F.filter(pairs, lambda pair: pair["value"] != 0)
    return StoredColumn(spec, (pairs["index"], pairs["value"]), length=size)


def _is_not_finite(value: Column) -> Column:
    return F.isnan(value) | (F.abs(value) == float("inf"))


def _exists(condition: Callable[[Column], Column]) -> Callable[[Column], Column]:
    return lambda array: F.exists(array, condition)


def _leaf(data_type: T.ArrayType) -> tuple[T.DataType, int]:
    element, depth = data_type.elementType, 1
    while isinstance(element, T.ArrayType):
        element, depth = element.elementType, depth + 1
    return element, depth


def _dtype(name: str, leaf: T.DataType, data_type: T.DataType) -> str:
    if isinstance(leaf, T.DecimalType):
        return decimal_dtype(leaf.precision, leaf.scale)
    dtype = SPARK_DTYPES.get(type(leaf).__name__)
    if dtype is not None:
        return dtype
    raise ColumnError(
        f"Column {name!r} has type {data_type.simpleString()}.",
        column=name,
        remedy="Expected a number, a boolean, a vector or an array of numbers: "
        f"{_remedy(name, leaf)}.{_collate_hint(leaf)}",
    )


def _collate_hint(leaf: T.DataType) -> str:
    if all(isinstance(each, _ANY) for each in _leaves(leaf)):
        return " A collate_fn takes it unchanged."
    return ""


def _cast(leaf: T.DataType) -> tuple[str | None, bool]:
    """Return the type to which a type is cast, and whether its numbers are whole decimals."""
    if not isinstance(leaf, T.DecimalType):
        return None, False
    is_integer = decimal_dtype(leaf.precision, leaf.scale) == "int64"
    return "bigint" if is_integer else "double", leaf.scale == 0


def _remedy(name: str, leaf: T.DataType) -> str:
    # These have the same names as in pyspark.ml. A thin client lacks pyspark.mllib.
    if type(leaf).__module__.startswith("pyspark.mllib"):
        return _OLD_VECTORS.format(name=name)
    named = (_REMEDIES[kind.__name__] for kind in type(leaf).__mro__ if kind.__name__ in _REMEDIES)
    return next(named, "convert it to one of these, or leave it out")
