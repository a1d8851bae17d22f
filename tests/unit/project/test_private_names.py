"""Private names of other packages: each is where it was, and all are in the table.

A new version may move what is private. Names in Spark's JVM are in tests/spark/test_spark_names.py.
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

pytestmark = pytest.mark.versions

PUBLIC = {
    "_asdict": "of named tuples, which document it",
    "_exit": "of os, which documents it",
    "_module_available": "of Lightning 1: compat gives it back, and uses none of Lightning 2's",
}
"""Names with an underscore that are not private."""
ROOT = Path(hvd_estimators.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        pytest.param(row, name, id=f"{row.owner.split()[0]}-{name}")
        for row in TABLE
        for name in row.names.split()
    ],
)
def test_a_private_name_is_where_it_was(row: Private, name: str) -> None:
    if row.owner.startswith("petastorm"):
        reason = "not installable beside today's PyArrow"
        pytest.importorskip("petastorm", reason=reason, exc_type=ImportError)
    owner = next(filter(None, map(find, row.owner.split())), None)
    if not provides(owner, name):
        used = sorted({str(p.relative_to(ROOT)) for p, t in TREES.items() if name in names_in(t)})
        pytest.fail(f"{row.owner} has no {name} any more. It is used in {used} for: {row.why}")


def find(path: str) -> Any:
    """Return a module or a class by its path; None where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(find(module), name, None) if module else None


def provides(owner: Any, name: str) -> bool:
    """Return whether a module or class has a name, or its methods set it on instances."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", ()):
        return True
    modules = {entry.__module__ for entry in getattr(owner, "__mro__", ())} - {"builtins", "abc"}
    return any(name in set_on_self(sys.modules[module]) for module in modules)


@functools.cache
def set_on_self(module: ModuleType) -> set[str]:
    """Return the names that the methods of a module's classes set on their instances."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):  # written in C
        return set()
    return {node.attr for node in ast.walk(tree) if is_set_on_self(node)}


def is_set_on_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ("self", "instance")  # __new__ names it so
    )


def names_in(tree: ast.AST) -> set[str]:
    """Return all names and short strings of a file, and the methods that it defines."""
    found = set()
    for node in ast.walk(tree):
        found |= {
            value
            for value in (getattr(node, field, None) for field in ("attr", "name", "value", "id"))
            if isinstance(value, str)
        }
    return found


def foreign_names(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, int, str]]:
    """Yield names with an underscore that are used and that no file of the package defines."""
    own = {name for tree in trees.values() for name in defined_in(tree)}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(ROOT.name):
                names = [alias.name for alias in node.names]
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr")
                and isinstance(node.args[1], ast.Constant)
            ):
                names = [str(node.args[1].value)]
            for name in names:
                if name.startswith("_") and not name.startswith("__") and name not in own:
                    yield path, node.lineno, name


def defined_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif is_set_on_self(node):
            yield node.attr


def test_every_private_name_that_is_used_is_in_the_table() -> None:
    listed = {name for row in TABLE for name in row.names.split()}
    found = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for path, line, name in foreign_names(TREES)
        if name not in listed and name not in PUBLIC
    ]
    assert found == [], (
        "is there a public way? If not, add it to TABLE and docs/decisions/private_names.rst"
    )


def test_every_name_of_the_table_is_used() -> None:
    used = {name for tree in TREES.values() for name in names_in(tree)}
    listed = {name for row in TABLE for name in row.names.split()}
    assert sorted(listed - used) == []


def test_the_check_finds_private_names(tmp_path: Path) -> None:
    source = """\
from torch.nn.modules.batchnorm import _NormBase
class Layer:
    def __init__(self, model):
        self._own = model._jdf
        self._own._own
        getattr(model, "_orig_mod")
        print(model.__dict__, model.public)
"""
    found = [
        (line, name) for _, line, name in foreign_names({tmp_path / "x.py": ast.parse(source)})
    ]
    assert sorted(found) == [(1, "_NormBase"), (4, "_jdf"), (6, "_orig_mod")]
    assert provides(Path, "exists")
    assert not provides(Path, "_nothing_of_that_name")
