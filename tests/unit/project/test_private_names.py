"""Private names of other packages: each still exists, and all are in the table.

A new version may move private names. Names in Spark's JVM are in tests/spark/test_spark_names.py.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from private_names import TABLE, Private

import hvd_estimators

PUBLIC = {
    "_asdict": "Named tuples document it.",
    "_current_frames": "sys documents it.",
    "_exit": "os documents it.",
    "_fields": "Named tuples document it.",
    "_keras_mask": "Keras's guide on masking documents it.",
    "_module_available": "compat restores this name of Lightning 1, and uses none of Lightning 2.",
    "_momentum": "It ends the public names of an optimizer's variables.",
}
"""Names with an underscore that are not private names of other packages."""

SHARED = {
    *("_declarations", "_defaults", "_load_params", "_metadata", "_store_value", "_values"),
    *("_check_other_names", "_is_given", "_names_as_set"),  # of declared params
    *("_create_model", "_get_or_create_backend"),  # hooks of horovod.spark
    *(
        "_batch_names",
        "_floatx",
        "_input_keys",
        "_keras_config",
        "_upstream_names",
    ),  # params of saved models
    *("_from", "_hidden", "_is_row"),  # columns of `transform`
    "_loss",  # a loss in Lightning's loggers
    *("_PYTORCH", "_TENSORFLOW"),  # suffixes of Horovod's environment variables
    "_delta_log",  # Delta's folder
    "_mask",  # the end of a mask's name
}
"""Names with an underscore that several files of this package use or that are documented."""

ROOT = Path(hvd_estimators.__file__).parent
LISTED = {name for row in TABLE for name in row.names.split()}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of this package's files."""
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("row", "name"),
    [
        pytest.param(row, name, id=f"{row.owner.split()[0]}-{name}")
        for row in TABLE
        for name in row.names.split()
    ],
)
def test_private_names_still_exist(row: Private, name: str) -> None:
    if row.owner.startswith("petastorm"):
        reason = "not installable beside today's PyArrow"
        pytest.importorskip("petastorm", reason=reason, exc_type=ImportError)
    if row.until and find(row.until) is not None:
        pytest.skip(f"{row.until} replaces it")
    owner = next(filter(None, map(find, row.owner.split())), None)
    if not provides(owner, name):
        used = [str(path.relative_to(ROOT)) for path, tree in trees().items() if uses(tree, name)]
        pytest.fail(f"{row.owner} has no {name} any more. It is used in {used}. {row.why}")


def find(path: str) -> Any:
    """Return a module or a class by its path, or None if it does not exist."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(find(module), name, None) if module else None


def provides(owner: Any, name: str) -> bool:
    """Return True if a module or class has a name, or sets it on objects."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", ()):
        return True
    if isinstance(owner, ModuleType):
        modules = {owner.__name__}
    else:
        modules = {entry.__module__ for entry in getattr(owner, "__mro__", ())}
    found = {name for module in modules - {"builtins", "abc"} for name in set_by(module)}
    return any(matches(name, entry) for entry in found)


def matches(listed: str, name: str) -> bool:
    return name == listed or (listed[-1] == "*" and name.startswith(listed[:-1]))


@functools.cache
def set_by(module: str) -> set[str]:
    """Return the attributes that a module's functions set on any object."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # written in C
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def uses(tree: ast.AST, listed: str) -> bool:
    """Return True if a file has a name or short string, or defines a method of that name."""
    return listed.rstrip("*") in words_of(tree)


@functools.cache
def words_of(tree: ast.AST) -> set[str]:
    """Return names and strings of a file, without the qualifiers of dotted ones."""
    found = (
        getattr(node, field, None)
        for node in ast.walk(tree)
        for field in ("attr", "name", "value", "id")
    )
    return {text.rpartition(".")[2] for text in found if isinstance(text, str)}


def foreign_names(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, int, str]]:
    """Yield used private names that this package does not define.

    A file may use the names that it defines, and `SHARED` names. On ``self``, ``cls`` and
    ``super()`` it may use all names that the package defines, since classes inherit them.
    """
    defined = {path: {*defined_in(tree)} for path, tree in trees.items()}
    inherited = {name for names in defined.values() for name in names}
    for path, tree in trees.items():
        own = defined[path] | SHARED
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                is_own = ast.unparse(node.value) in ("self", "cls", "super()")
                if node.attr not in (inherited if is_own else own):
                    yield path, node.lineno, node.attr
            elif isinstance(node, ast.Constant) and is_private(node.value):
                if node.value not in own:
                    yield path, node.lineno, node.value
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(ROOT.name):
                is_internal = {"src", "_src"} & {*str(node.module).split(".")}
                for alias in node.names:
                    if is_internal or is_private(alias.name):
                        yield path, node.lineno, alias.name


def is_private(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and name[0] == "_" != name[1:2] != ""


def defined_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            yield node.attr


def test_every_used_private_name_is_in_the_table() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for path, line, name in foreign_names(trees())
        if not any(matches(entry, name) for entry in LISTED) and name not in PUBLIC
    ]
    assert found == [], (
        "is there a public way? If not, add it to TABLE in tests/helpers/private_names.py"
    )


def test_every_name_in_the_table_is_used() -> None:
    unused = [name for name in LISTED if not any(uses(tree, name) for tree in trees().values())]
    assert sorted(unused) == []


def test_the_documentation_shows_every_row() -> None:
    page = (ROOT.parent / "docs" / "decisions" / "private_names.rst").read_text()
    shown = {
        group
        for line in page.splitlines()
        if ".. private-names::" in line
        for group in line.split()[2:]
    }
    assert {row.owner.partition(".")[0] for row in TABLE} == shown - {"jvm"}


def test_the_check_finds_private_names(tmp_path: Path) -> None:
    own = "class Own:\n    def __init__(self):\n        self._elsewhere = 1\n"
    source = """\
from torch.nn.modules.batchnorm import _NormBase
from keras.src.layers import Dense
class Layer:
    def __init__(self, model):
        self._own = model._jdf
        self._own._own
        self._elsewhere
        model._elsewhere
        getattr(model, "_orig_mod")
        print(model.__dict__, model.public)
"""
    trees = {tmp_path / "x.py": ast.parse(source), tmp_path / "y.py": ast.parse(own)}
    found = [(path.name, line, name) for path, line, name in foreign_names(trees)]
    assert sorted(found) == [
        ("x.py", 1, "_NormBase"),
        ("x.py", 2, "Dense"),
        ("x.py", 5, "_jdf"),
        ("x.py", 8, "_elsewhere"),
        ("x.py", 9, "_orig_mod"),
    ]
    assert provides(Path, "exists")
    assert not provides(Path, "_nothing_of_that_name")
