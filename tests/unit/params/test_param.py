"""Declaration of params."""

import inspect

import numpy as np
import pytest
from pyspark.ml.param import Param, Params, TypeConverters

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import (
    DeclaredParams,
    boolean,
    column_names,
    functions,
    integer,
    number,
    numbers,
    one_of,
    param,
    shapes,
    string,
)

pytestmark = pytest.mark.versions


class Base(DeclaredParams):
    """Trains nothing."""

    epochs = param("Epochs of the run.", default=1, convert=integer(1))
    batch_size = param("Rows of a batch.", default=32, convert=integer(1))
    model = param("The model.")

    def __init__(self, **kwargs):
        super().__init__()
        self.setParams(**kwargs)


class Derived(Base):
    """Trains nothing in another way."""

    feature_cols = param("Input columns.", convert=column_names)
    pool_size = param(
        "Readers.", default=2, convert=integer(1), accessor="PoolSizes", aliases=["Readers"]
    )


class Wider(Derived):
    batch_size = param("Rows of a wide batch.", default=64, convert=integer(8))


def test_none_means_the_default():
    params = Derived(epochs=3, batch_size=None)
    params.setEpochs(None)

    assert (params.getEpochs(), params.getBatchSize()) == (1, 32)
    assert not params.isSet("epochs")


def test_subclasses_can_redeclare_params():
    assert Wider().getBatchSize() == 64
    assert Derived().getBatchSize() == 32
    with pytest.raises(ParamError, match="batch_size: expected 8 or more"):
        Wider(batch_size=4)


def test_accessors_can_have_other_names_and_aliases():
    params = Derived().setPoolSizes(3)

    assert params.getReaders() == params.getPoolSizes() == 3
    assert params.setReaders(4).getPoolSizes() == 4
    assert not hasattr(params, "getPoolSize")


def test_custom_accessors_are_kept():
    class Own(DeclaredParams):
        epochs = param("Epochs.", default=1)

        def getEpochs(self):
            return "own"

    assert Own().getEpochs() == "own"
    assert Own().setEpochs(2).getOrDefault("epochs") == 2


class OwnColumns(Params):
    """Mixin of another package with accessors of the same names."""

    batch = Param(Params._dummy(), "batch", "a column")

    def getBatchSize(self):
        return self.getOrDefault(self.batch)

    def setBatchSize(self, value):
        return self._set(batch=value)


def test_accessors_of_other_bases_take_precedence():
    class Both(Derived, OwnColumns):
        pass

    class Further(Both):
        def setBatchSize(self, value):
            return super().setBatchSize(value + 1)

    for cls, expected in [(Both, 3), (Further, 4)]:
        both = cls(batch_size=8).setBatchSize(3)
        assert both.getBatchSize() == expected
        assert both.getOrDefault("batch_size") == 8
    assert Derived(batch_size=8).getBatchSize() == 8


def test_params_can_be_set_like_sparks():
    class Both(Derived):
        width = Param(Params._dummy(), "width", "Ours not.", typeConverter=TypeConverters.toInt)

    both, other = Both(width=3.0), Both()
    assert (both.getOrDefault("width"), type(both.getOrDefault("width"))) == (3, int)
    both.set(both.feature_cols, "x")
    assert both.getFeatureCols() == ["x"]
    with pytest.raises(ParamError, match="width: Could not convert"):
        both.set(both.width, "wide")
    with pytest.raises(ParamError, match="epochs: expected a whole number"):
        both.set(both.epochs, "two")
    with pytest.raises(ParamError, match=f"epochs: .*does not belong to {both.uid}"):
        both.set(other.epochs, 2)
    assert (both.getEpochs(), both.getOrDefault("width")) == (1, 3)


def test_extra_values_of_a_copy_are_checked_and_none_means_the_default():
    original = Derived(epochs=3)

    assert original.copy({original.epochs: None}).getEpochs() == 1
    assert original.getEpochs() == 3
    with pytest.raises(ParamError, match="epochs: expected 1 or more, found 0"):
        original.copy({original.epochs: 0})


def test_extra_values_for_other_objects_are_ignored():
    original, other = Derived(epochs=2), Derived()
    for_all = {original.epochs: 5, other.batch_size: 7, other.epochs: 9, Derived.pool_size: 4}

    copied = original.copy(for_all)

    assert (copied.getEpochs(), copied.getPoolSizes()) == (5, 4)
    assert copied.getBatchSize() == original.getBatchSize() != 7
    assert Base().copy({original.epochs: 5}).getBatchSize() == Base().getBatchSize()


@pytest.mark.parametrize("cls", [Base, Derived, Wider])
def test_the_signature_lists_all_params_with_their_defaults(cls):
    parameters = inspect.signature(cls).parameters

    expected = {"epochs": 1, "batch_size": 32, "model": None}
    if cls is not Base:
        expected.update(feature_cols=None, pool_size=2)
    if cls is Wider:
        expected["batch_size"] = 64
    assert {name: p.default for name, p in parameters.items()} == expected
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("cls", [Base, Derived])
def test_the_docstring_ends_with_a_section_of_all_params(cls):
    doc = inspect.getdoc(cls)

    assert doc.startswith("Trains nothing")
    assert doc.count("Parameters\n----------\n") == 1
    assert "\nepochs : int, default 1\n    Epochs of the run.\n" in doc
    assert "\nmodel : object, default None\n    The model." in doc
    columns = "\nfeature_cols : str | Iterable[str], default None\n    Input columns.\n"
    assert (columns in doc) == (cls is Derived)


@pytest.mark.parametrize(
    ("convert", "given", "kept"),
    [
        (integer(), -3, -3),
        (integer(1), 1, 1),
        (integer(1), 2.0, 2),
        (integer(1), np.int64(2), 2),
        (numbers, np.array([1, 0.5]), [1.0, 0.5]),
        (number(), 1, 1.0),
        (number(0), 0.5, 0.5),
        (number(0), np.float32(0.5), 0.5),
        (boolean, False, False),
        (string, "a", "a"),
        (column_names, "a", ["a"]),
        (column_names, ("a", "b"), ["a", "b"]),
        (column_names, [], []),
        (numbers, 1, [1.0]),
        (numbers, (1, 0.5), [1.0, 0.5]),
        (functions, len, [len]),
        (functions, (len, max), [len, max]),
        (one_of("a", "b"), "b", "b"),
        (shapes, [(-1, 2), [-1]], [[-1, 2], [-1]]),
        (shapes, [[2], (28, 28), []], [[-1, 2], [-1, 28, 28], [-1]]),
        (shapes, [[2, -1]], [[-1, 2, -1]]),
    ],
)
def test_converters_normalize_values(convert, given, kept):
    converted = convert("name", given)

    assert converted == kept
    assert type(converted) is type(kept)


class WithLists(Base):
    callbacks = param("Callbacks.", default=[])
    options = param("Options.", default={"a": [1]})
    shuffle = param("Whether to shuffle.", default=True, convert=boolean)


@pytest.mark.parametrize("convert", [integer(), number()])
def test_a_boolean_is_no_number(convert):
    with pytest.raises(ParamError, match=r"^rate: expected a .*number, found True"):
        convert("rate", True)


def test_lists_and_dicts_are_copied():
    first, second = WithLists(), WithLists()
    first.getCallbacks().append("mine")
    first.getOptions()["a"].append(2)

    assert (first.getCallbacks(), second.getCallbacks()) == ([], [])
    assert (first.getOptions(), WithLists().getOptions()) == ({"a": [1]}, {"a": [1]})

    callback, given = object(), {"a": [1]}
    first.setCallbacks([callback]).setOptions(given)
    copied = first.copy()
    given["a"].append(2)
    copied.getOptions()["b"] = 1

    assert first.getOptions() == copied.getOptions() == {"a": [1]}
    assert copied.getCallbacks()[0] is callback


@pytest.mark.parametrize("scalar", [np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a")])
def test_numpy_scalars_become_python_scalars(scalar):
    params = WithLists(model=scalar, options={scalar: [scalar, (scalar,)]})

    plain = scalar.item()
    assert (params.getModel(), params.getOptions()) == (plain, {plain: [plain, (plain,)]})
    assert type(params.getModel()) is type(plain)
    ((key, (entry, (inner,))),) = params.getOptions().items()
    assert {type(key), type(entry), type(inner)} == {type(plain)}
