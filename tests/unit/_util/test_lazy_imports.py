"""Hooks on the imports of other packages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hvd_estimators._util.lazy_imports import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose module ``user`` reads its module ``hooked`` at import time."""
    folder = tmp_path / "package_with_hook"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "hooked.py").write_text("value = 'own'\n")
    (folder / "user.py").write_text("from package_with_hook.hooked import value as seen\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("package_with_hook", "package_with_hook.hooked", "package_with_hook.user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "package_with_hook"


def replace_value(module: ModuleType) -> None:
    assert module.value == "own"
    module.value = "replaced"  # type: ignore[attr-defined]


def test_a_module_is_patched_before_others_see_it_but_not_imported_early(package: str) -> None:
    finders = list(sys.meta_path)
    with after_import(f"{package}.hooked", replace_value):
        assert f"{package}.hooked" not in sys.modules
        assert importlib.import_module(f"{package}.user").seen == "replaced"
    assert sys.meta_path == finders


def test_an_imported_module_is_patched_at_once(package: str) -> None:
    module = importlib.import_module(f"{package}.hooked")
    with after_import(f"{package}.hooked", replace_value):
        assert module.value == "replaced"


def test_a_missing_module_raises_the_usual_error(package: str) -> None:
    with (
        after_import(f"{package}.missing", replace_value),
        pytest.raises(ModuleNotFoundError, match="missing"),
    ):
        importlib.import_module(f"{package}.missing")
