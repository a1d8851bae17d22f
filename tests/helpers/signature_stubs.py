"""Stubs with the constructors, setters and getters that declared params have, for type checkers.

``python tests/helpers/signature_stubs.py`` writes the ``signatures.pyi`` files of the package.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.keras import KerasEstimator, KerasModel
from hvd_estimators.keras.params import KerasParams
from hvd_estimators.lightning import LightningEstimator, LightningModel
from hvd_estimators.lightning.params import LightningParams
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import DeclaredParams
from hvd_estimators.torch import TorchEstimator, TorchModel
from hvd_estimators.torch.params import TorchParams

PACKAGE = Path(inspect.getfile(DeclaredParams)).parents[1]

IMPORTS = {
    "ABCMeta": "from abc import ABCMeta",
    "Any": "from typing import Any",
    "Callable": "from collections.abc import Callable",
    "DataFrame": "from pyspark.sql import DataFrame",
    "DataType": "from pyspark.sql.types import DataType",
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
    "Self": "from typing_extensions import Self",
    "Sequence": "from collections.abc import Sequence",
    "Store": "from hvd_estimators.store import Store",
    "keras": "import keras",
    "overload": "from typing import overload",
    "torch": "import torch",
}
"""Names in annotations and their imports."""


FRAMEWORKS = (
    ("keras", KerasEstimator, KerasParams, HorovodEstimator, KerasModel, HorovodModel),
    ("torch", TorchEstimator, TorchParams, HorovodEstimator, TorchModel, HorovodModel),
    ("lightning", LightningEstimator, LightningParams, TorchEstimator, LightningModel, TorchModel),
)
"""For each framework: estimator and its params, model, and the classes with inherited accessors."""


def stubs() -> dict[Path, str]:
    """Return the text of each stub file."""
    common = [
        _class("EstimatorSignatures", DeclaredParams, _accessors(HorovodEstimator)),
        _class("ModelSignatures", DeclaredParams, _accessors(HorovodModel)),
    ]
    return {
        PACKAGE / "params" / "signatures.pyi": _file(common),
        **{
            PACKAGE / framework / "signatures.pyi": _file(
                [
                    _class(
                        f"{estimator.__name__}Signatures",
                        params,
                        [
                            *_constructor(estimator),
                            *_fits(estimator, model),
                            *_accessors(estimator, estimator_base),
                        ],
                    ),
                    _class(
                        f"{model.__name__}Signatures",
                        model_base,
                        [*_constructor(model), *_accessors(model, model_base)],
                    ),
                ]
            )
            for framework, estimator, params, estimator_base, model, model_base in FRAMEWORKS
        },
    }


def _class(name: str, base: type, members: list[str]) -> str:
    head = f"class {name}({base.__name__}, metaclass=ABCMeta):"
    return "\n".join([head, *(f"    {line}" for line in members), ""])


def _constructor(cls: type[DeclaredParams]) -> list[str]:
    """Return the constructor, and ``setParams`` with the same params."""
    public = {name: d for name, d in cls._declarations.items() if not name.startswith("_")}
    shown = [f"{name}: {d.setter_type} = {_literal(d.default)}," for name, d in public.items()]
    unset = [f"{name}: {d.setter_type} = ...," for name, d in public.items()]
    return [
        *("def __init__(self, *,", *shown, ") -> None: ..."),
        *("def setParams(", "self, *,", *unset, ") -> Self: ..."),
    ]


def _literal(default: Any) -> str:
    simple = default is None or isinstance(default, (bool, int, float, str))
    return repr(default) if simple else "..."


def _fits(estimator: type[HorovodEstimator], model: type[HorovodModel]) -> list[str]:
    """Return the methods that return the framework's model, as pyspark declares them."""
    lists = "list[ParamMap] | tuple[ParamMap, ...]"
    name = model.__name__
    return [
        "@overload",
        f"def fit(self, dataset: DataFrame, params: ParamMap | None = None) -> {name}: ...",
        "@overload",
        f"def fit(self, dataset: DataFrame, params: {lists}) -> list[{name}]: ...",
        "def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Mapping[Any, Any]]) -> "
        f"Iterator[tuple[int, {name}]]: ...",
        "def fit_on_parquet(self, path: Paths | Mapping[Any, Any] | None = None, "
        "dataset_idx: str | None = None, *, validation_path: Paths | None = None, "
        f"params: Mapping[Any, Any] | None = None) -> {name}: ...",
    ]


def _accessors(cls: type[DeclaredParams], base: type[DeclaredParams] | None = None) -> list[str]:
    """Return the getters and setters whose types differ from those of a base class."""
    lines = []
    for name, declaration in cls._declarations.items():
        inherited = None if base is None else base._declarations.get(name)
        types = (declaration.getter_type, declaration.setter_type)
        if name.startswith("_") or (
            inherited and types == (inherited.getter_type, inherited.setter_type)
        ):
            continue
        for suffix in declaration.accessors(name):
            # The source has the signatures of methods that a class defines itself.
            if getattr(getattr(cls, f"get{suffix}"), "is_declared", False):
                lines.append(f"def get{suffix}(self) -> {types[0]}: ...")
            if getattr(getattr(cls, f"set{suffix}"), "is_declared", False):
                lines.append(f"def set{suffix}(self, value: {types[1]}) -> Self: ...")
    return lines


def _file(classes: list[str]) -> str:
    text = "\n".join(classes)
    names = {*re.findall(r"\w+", text)}
    own = {*re.findall(r"^class \w+\((\w+)", text, re.M), *re.findall(r"-> (\w+Model)\b", text)}
    return _formatted(
        "\n".join(
            [
                "# Generated from the declarations of params by tests/helpers/signature_stubs.py.",
                "# Frameworks narrow params of the base classes.",
                '# mypy: disable-error-code="override"',
                *sorted({IMPORTS[name] for name in names & IMPORTS.keys()}),
                *sorted(map(_import_of, own)),
                text,
            ]
        )
    )


def _import_of(name: str) -> str:
    return f"from {globals()[name].__module__} import {name}"


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
