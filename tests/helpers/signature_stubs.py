"""Stubs with the constructors, setters and getters that declared params have, for type checkers.

``python tests/helpers/signature_stubs.py`` writes the ``signatures.pyi`` files of the package.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.keras import KerasEstimator, KerasModel
from hvd_estimators.lightning import LightningEstimator, LightningModel
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import DeclaredParams
from hvd_estimators.torch import TorchEstimator, TorchModel

PACKAGE = Path(inspect.getfile(DeclaredParams)).parents[1]

IMPORTS = {
    "ABCMeta": "from abc import ABCMeta",
    "Any": "from typing import Any",
    "Callable": "from collections.abc import Callable",
    "Column": "from pyspark.sql import Column",
    "DataFrame": "from pyspark.sql import DataFrame",
    "DataType": "from pyspark.sql.types import DataType",
    "EstimatorParams": "from hvd_estimators.params.estimator import EstimatorParams",
    "Iterable": "from collections.abc import Iterable",
    "Iterator": "from collections.abc import Iterator",
    "Literal": "from typing import Literal",
    "Logger": "from hvd_estimators.loggers import Logger",
    "Mapping": "from collections.abc import Mapping",
    "NDArray": "from numpy.typing import NDArray",
    "ParamMap": "from pyspark.ml._typing import ParamMap",
    "PathLike": "from os import PathLike",
    "Paths": "from hvd_estimators.fitting.stores import Paths",
    "ResourceProfile": "from pyspark.resource import ResourceProfile",
    "Self": "from typing import Self",
    "Sequence": "from collections.abc import Sequence",
    "SharedParams": "from hvd_estimators.params.model import SharedParams",
    "Store": "from hvd_estimators.store import Store",
    "TypeVar": "from typing import TypeVar",
    "TypedDict": "from typing import TypedDict",
    "Unpack": "from typing import Unpack",
    "getter": "from hvd_estimators.params.signatures import getter",
    "keras": "import keras",
    "overload": "from typing import overload",
    "setter": "from hvd_estimators.params.signatures import setter",
    "torch": "import torch",
}
"""Names in annotations and their imports."""


FRAMEWORKS = (
    ("torch", TorchEstimator, HorovodEstimator, TorchModel, HorovodModel),
    ("keras", KerasEstimator, HorovodEstimator, KerasModel, HorovodModel),
    ("lightning", LightningEstimator, TorchEstimator, LightningModel, TorchModel),
)
"""For each framework: estimator and the class that it inherits from, and the same for the model."""

FITS = """\
    @overload
    def fit(self, dataset: DataFrame, params: ParamMap | None = None) -> Fitted: ...
    @overload
    def fit(
        self, dataset: DataFrame, params: list[ParamMap] | tuple[ParamMap, ...]
    ) -> list[Fitted]: ...
    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[Mapping[Any, Any]]
    ) -> Iterator[tuple[int, Fitted]]: ...
    def fit_on_parquet(
        self,
        path: Paths | Mapping[Any, Any] | None = None,
        dataset_idx: str | None = None,
        *,
        validation_path: Paths | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> Fitted: ...
    def fit_on_table(
        self,
        table: str,
        where: str | Column | None = None,
        *,
        validation_where: str | Column | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> Fitted: ...
"""
"""The methods that return the model, for an estimator whose base class returns another one."""

ACCESSORS = """\
T = TypeVar("T")

def getter(self: object) -> Any: ...
def setter(self: T, value: Any) -> T: ...
"""


def stubs() -> dict[Path, str]:
    """Return the text of each stub file."""
    common = [
        ACCESSORS,
        _keywords(HorovodEstimator),
        _class("EstimatorSignatures", "EstimatorParams", _accessors(HorovodEstimator)),
        _keywords(HorovodModel),
        _class("ModelSignatures", "SharedParams", _accessors(HorovodModel)),
    ]
    return {
        PACKAGE / "params" / "signatures.pyi": _file(common),
        **{
            PACKAGE / framework / "signatures.pyi": _file(
                [
                    _keywords(estimator, base),
                    _class(
                        f"{estimator.__name__}Signatures",
                        (
                            f"HorovodEstimator[{model.__name__}]"
                            if base is HorovodEstimator
                            else base.__name__
                        ),
                        _constructor(estimator),
                        "" if base is HorovodEstimator else FITS.replace("Fitted", model.__name__),
                        _accessors(estimator, base),
                    ),
                    _keywords(model, model_base),
                    _class(
                        f"{model.__name__}Signatures",
                        model_base.__name__,
                        _constructor(model),
                        _accessors(model, model_base),
                    ),
                ]
            )
            for framework, estimator, base, model, model_base in FRAMEWORKS
        },
    }


def _class(name: str, bases: str, *members: str) -> str:
    return "\n".join([f"class {name}({bases}, metaclass=ABCMeta):", *members])


def _keywords(cls: type[DeclaredParams], base: type[DeclaredParams] | None = None) -> str:
    """Return the dict of keywords that the constructor and ``setParams`` accept."""
    inherited = {} if base is None else _keyword_types(base)
    own = {name: each for name, each in _keyword_types(cls).items() if name not in inherited}
    parent = "TypedDict" if base is None else f"{base.__name__}Keywords"
    head = f"class {cls.__name__}Keywords({parent}, total=False):"
    return "\n".join([head, *(f"    {name}: {each}" for name, each in own.items()), ""])


def _keyword_types(cls: type[DeclaredParams]) -> dict[str, str]:
    """Return the types of the keywords; a derived dict cannot narrow a keyword of its base."""
    subclasses = [each for row in FRAMEWORKS for each in (row[1], row[3]) if issubclass(each, cls)]
    return {
        name: declaration.setter_type
        for name, declaration in cls._declarations.items()
        if not name.startswith("_")
        and {each._declarations[name].setter_type for each in subclasses}
        <= {declaration.setter_type}
    }


def _constructor(cls: type[DeclaredParams]) -> str:
    return (
        f"    def __init__(self, **params: Unpack[{cls.__name__}Keywords]) -> None: ...\n"
        f"    def setParams(self, **params: Unpack[{cls.__name__}Keywords]) -> Self: ...\n"
    )


def _accessors(cls: type[DeclaredParams], base: type[DeclaredParams] | None = None) -> str:
    """Return the getters and setters that a base class lacks; models' getters have types."""
    getters, setters, typed = [], [], []
    for name, declaration in cls._declarations.items():
        inherited = None if base is None else base._declarations.get(name)
        for suffix in () if name.startswith("_") else declaration.accessors(name):
            # The source has the signatures of methods that a class defines itself.
            has_getter, has_setter = (
                getattr(getattr(cls, f"{prefix}{suffix}"), "is_declared", False)
                for prefix in ("get", "set")
            )
            kind = declaration.getter_type
            if has_getter and issubclass(cls, HorovodModel):
                if inherited is None or kind != inherited.getter_type:
                    typed.append(f"    def get{suffix}(self) -> {kind}: ...")
            elif has_getter and inherited is None:
                getters.append(f"get{suffix}")
            if has_setter and inherited is None:
                setters.append(f"set{suffix}")
    return "\n".join([*_same(getters, "getter"), *typed, *_same(setters, "setter")])


def _same(names: list[str], method: str) -> list[str]:
    chunks = (names[start : start + 3] for start in range(0, len(names), 3))
    return [f"    {' = '.join([*chunk, method])}" for chunk in chunks]


def _file(classes: list[str]) -> str:
    text = "\n".join(classes)
    # Not the words in texts, such as the values of collectives.
    used = re.sub(r"(['\"])\w+\1", "", text)
    names = {*re.findall(r"\w+", used)} - {*re.findall(r"^(?:class|def) (\w+)", text, re.M)}
    known = {each.__name__: each for row in FRAMEWORKS for each in row[1:]}
    keywords = {f"{name}Keywords": cls for name, cls in known.items()}
    return _formatted(
        "\n".join(
            [
                "# Generated from the declarations of params by tests/helpers/signature_stubs.py.",
                '# mypy: disable-error-code="override"',
                *(IMPORTS[name] for name in sorted(names & IMPORTS.keys())),
                *(f"from {known[n].__module__} import {n}" for n in sorted(names & known.keys())),
                *(
                    f"from {_stub_module(keywords[name])} import {name}"
                    for name in sorted(names & keywords.keys())
                ),
                text,
            ]
        )
    )


def _stub_module(cls: type[DeclaredParams]) -> str:
    package = cls.__module__.split(".")[1]
    framework = package if package in (row[0] for row in FRAMEWORKS) else "params"
    return f"hvd_estimators.{framework}.signatures"


def _formatted(text: str) -> str:
    for command in (["check", "--select", "I", "--fix-only"], ["format"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", "x.pyi", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=PACKAGE.parent,
        )
        text = done.stdout
    return text


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
