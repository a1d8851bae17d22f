"""Import rules, checked in the source; test_imports checks the modules that processes load."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import hvd_estimators

LAYERS = (
    ("commands",),
    ("compat",),
    ("keras", "lightning"),
    ("torch",),
    ("estimator",),
    ("training",),
    ("prepare", "loading", "launch"),
    ("data",),
    ("store",),
    ("base",),
)
"""Packages from top to bottom. A package imports only packages below it."""

LAUNCH_LAYERS = (("cluster",), ("task",), ("service",), ("rank",), ("warm", "rendezvous"))
"""The folders of ``launch/`` from top to bottom; its files are above or below all folders."""

PACKAGES = {
    "__init__": "base",
    "__main__": "commands",
    "_util": "base",
    "exceptions": "base",
    "fitting": "estimator",
    "inference": "estimator",
    "loggers": "base",
    "model": "estimator",
    "params": "estimator",
    "saving": "estimator",
}
"""Layers of modules at the package's root, and of the packages for a fit."""

SPARK = ("pyspark", "py4j")
SPARK_FILES = ("cluster", "relaunch", "api", "spark_backend", "task")
"""Modules of ``launch/`` for Spark's driver and Python workers; ranks run the rest."""

FRAMEWORKS = {
    "torch": ("torch", "lightning", "compat", "keras"),
    "torchmetrics": ("lightning", "torch"),
    "lightning": ("lightning", "compat"),
    "pytorch_lightning": ("lightning", "compat"),
    "lightning_fabric": ("lightning",),
    "lightning_utilities": ("lightning", "compat"),
    "keras": ("keras", "compat"),
    "tensorflow": ("keras",),
    "horovod.torch": ("torch", "lightning"),
    "horovod.tensorflow": ("keras", "compat"),
    "horovod.keras": ("keras",),
}
"""Frameworks and the packages that may import each framework."""


@dataclass(frozen=True)
class Import:
    """Import of a module, at the top, within a function, or only for type checkers."""

    module: str
    line: int
    name: str
    for_types: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"

    def is_of(self, package: str) -> bool:
        return f"{self.name}.".startswith(f"{package}.")


def read_imports(root: Path) -> dict[str, list[Import]]:
    """Return the imports of each module of a package; names of its modules omit the package.

    Imports of an ``__init__`` for type checkers are omitted, because they only re-export names.
    """
    files = {name_of(path.relative_to(root)): path for path in root.rglob("*.py")}
    return {
        module: [
            Import(module, line, own_module(root.name, name, files) or name, for_types)
            for line, name, for_types in imported_names(ast.parse(path.read_text()))
            if not (for_types and path.name == "__init__.py")
        ]
        for module, path in files.items()
    }


def name_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def own_module(package: str, name: str, modules: Collection[str]) -> str | None:
    """Return the module of a name, or None for names outside the package."""
    first, _, rest = name.partition(".")
    if first != package:
        return None
    while rest not in modules:
        rest = rest.rpartition(".")[0] or "__init__"
    return rest


def imported_names(node: ast.AST, for_types: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Yield line, name, and a flag for type checkers of each import below a node."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from imported_names(child, for_types=True)
        for child in node.orelse:
            yield from imported_names(child, for_types)
        return
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name, for_types) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "expected absolute imports, which say whose module it is"
        names = (f"{node.module}.{alias.name}" for alias in node.names)
        yield from ((node.lineno, name, for_types) for name in names)
    elif (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and isinstance(node.args[0], ast.Constant)
    ):
        yield node.lineno, str(node.args[0].value), for_types
    for child in ast.iter_child_nodes(node):
        yield from imported_names(child, for_types)


def is_of_spark(module: str) -> bool:
    """Return True if a module runs in Spark's driver or Python workers, but not in ranks."""
    return any(f"{module}.".startswith(f"launch.{name}.") for name in SPARK_FILES)


def package(module: str) -> str:
    first, _, rest = module.partition(".")
    if first in PACKAGES:
        return PACKAGES[first]
    return first if rest or any(first in layer for layer in LAYERS) else "estimator"


def upward(imports: Mapping[str, Sequence[Import]]) -> list[str]:
    """Return the imports of packages that are not below the importing one."""
    heights = {name: -i for i, layer in enumerate(LAYERS) for name in layer}
    return [
        f"{found} ({package(module)} is not above {package(found.name)})"
        for module, names in imports.items()
        for found in names
        if found.name in imports
        and package(found.name) != package(module)
        and heights[package(found.name)] >= heights[package(module)]
    ]


def circles(imports: Mapping[str, Sequence[Import]]) -> list[str]:
    """Return the import cycles."""
    found, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for entry in imports[module]:
                if entry.name in imports:
                    visit(entry.name, [*path, module])
            done.add(module)

    for module in imports:
        visit(module, [])
    return found


def brought(imports: Mapping[str, Sequence[Import]], module: str) -> list[Import]:
    """Return the imports of a module at run time, transitively."""
    reached, waiting, found = {module}, [module], []
    for name in waiting:
        for entry in imports[name]:
            if entry.for_types:
                continue
            found.append(entry)
            if entry.name in imports and entry.name not in reached:
                reached.add(entry.name)
                waiting.append(entry.name)
    return found


IMPORTS = read_imports(Path(hvd_estimators.__file__).parent)
RANK_PACKAGES = ("launch", "loading", "data", "training")
RANK_MODULES = [
    module
    for module in IMPORTS
    if module.endswith(".trainer") or (package(module) in RANK_PACKAGES and not is_of_spark(module))
]


def test_packages_import_only_packages_below() -> None:
    assert upward(IMPORTS) == []


def test_the_folders_of_launch_are_layered() -> None:
    floors = {name: floor for floor, names in enumerate(LAUNCH_LAYERS) for name in names}

    def floor_of(module: str) -> int | None:
        first, _, rest = module.partition(".")
        return floors.get(rest.partition(".")[0]) if first == "launch" else None

    found = []
    for module, entries in IMPORTS.items():
        for entry in entries:
            mine, other = floor_of(module), floor_of(entry.name)
            if mine is not None and other is not None and other < mine and not entry.for_types:
                found.append(f"{module} imports {entry.name}")
    assert found == []
    assert {
        module.split(".")[1]
        for module in IMPORTS
        if module.count(".") > 1 and (module.startswith("launch."))
    } == set(floors)


def test_there_are_no_import_cycles() -> None:
    assert circles(IMPORTS) == []


@pytest.mark.parametrize("module", RANK_MODULES)
def test_a_rank_can_run_without_pyspark(module: str) -> None:
    found = [i for i in brought(IMPORTS, module) if any(i.is_of(package) for package in SPARK)]
    assert list(map(str, found)) == []


@pytest.mark.parametrize("module", ["inference.udf", "torch.predictor"])
def test_python_workers_predict_without_spark_ml(module: str) -> None:
    """Spark ML imports SciPy, a fifth of the wait for a session's first prediction."""
    assert [str(i) for i in brought(IMPORTS, module) if i.is_of("pyspark.ml")] == []


def test_frameworks_are_imported_only_in_their_packages() -> None:
    found = [
        str(entry)
        for module, entries in IMPORTS.items()
        for entry in entries
        for framework, homes in FRAMEWORKS.items()
        if entry.is_of(framework) and not entry.for_types and package(module) not in homes
    ]
    assert found == []


def test_the_rules_find_violations(tmp_path: Path) -> None:
    sources = {
        "__init__.py": "",
        "store/__init__.py": "from house.store.base import Store",
        "store/base.py": "def f():\n    from house.store import local",
        "store/local.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from house.store.base import Store\nimport house.training.rank",
        "training/rank.py": "from typing import TYPE_CHECKING\nimport importlib\n"
        "if TYPE_CHECKING:\n    import torch\nimportlib.import_module('keras')",
        "keras/trainer.py": "import house.estimator",
        "estimator.py": "from pyspark.sql import DataFrame",
    }
    for name, source in sources.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    imports = read_imports(tmp_path / "house")

    assert upward(imports) == ["store.local:4 imports training.rank (store is not above training)"]
    assert circles(imports) in (
        ["store.base -> store.local -> store.base"],
        ["store.local -> store.base -> store.local"],
    )
    assert [(i.name, i.for_types) for i in imports["training.rank"]] == [
        ("typing.TYPE_CHECKING", False),
        ("importlib", False),
        ("torch", True),
        ("keras", False),
    ]
    assert "pyspark.sql.DataFrame" in [i.name for i in brought(imports, "keras.trainer")]


def test_modules_of_tests_have_different_names() -> None:
    """Most folders of tests are no packages, so equal names would be one module."""
    names = [
        path.name
        for path in Path(__file__).parents[2].rglob("*.py")
        if path.name != "conftest.py" and not (path.parent / "__init__.py").exists()
    ]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []


def test_no_test_replaces_functions_of_time() -> None:
    """They are also those of other tests' threads, which then loop without pauses."""
    replaced = re.compile(
        r"""setattr\(\s*["']?(?:[\w.]+\.)?time(?:["'.]|,\s*["'])(?:sleep|\w*time|monotonic)"""
    )
    assert replaced.search('monkeypatch.setattr(retries.time, "sleep", f)')
    assert replaced.search('monkeypatch.setattr("time.monotonic", f)')
    tests = Path(__file__).parents[2]
    found = [
        p.name
        for p in tests.rglob("*.py")
        if p != Path(__file__) and replaced.search(p.read_text())
    ]
    assert found == []
