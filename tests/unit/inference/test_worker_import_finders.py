"""Python workers clear cached finders of archives that they import modules from."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_estimators.inference.worker import forget_archives

NAMES = ("archived", "archived.inner", "archived.inner.first", "archived.inner.second")


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "library.zip"
    write(path, NAMES[:3])
    monkeypatch.syspath_prepend(str(path))
    yield path
    for name in NAMES:
        sys.modules.pop(name, None)


def write(path: Path, names: tuple[str, ...]) -> None:
    files = [n.replace(".", "/") for n in names]
    with zipfile.ZipFile(path, "w") as file:
        for name in files:
            is_package = any(other.startswith(f"{name}/") for other in files)
            file.writestr(f"{name}/__init__.py" if is_package else f"{name}.py", f"n = {name!r}")


def of_archive(path: Path) -> list[str]:
    return sorted(name for name in sys.path_importer_cache if name.startswith(str(path)))


def test_the_archives_finder_stays_and_finds_later_modules(archive: Path) -> None:
    assert importlib.import_module("archived.inner.first").n == "archived/inner/first"
    folders = [f"{archive}/archived", f"{archive}/archived/inner"]
    assert of_archive(archive) == [str(archive), *folders]

    forget_archives()

    assert of_archive(archive) == [str(archive)]
    # As Spark does at the start of a task, which may have an additional file.
    write(archive, NAMES)
    importlib.invalidate_caches()
    assert importlib.import_module("archived.inner.second").n == "archived/inner/second"


def test_finders_of_jars_are_removed_and_others_stay(archive: Path) -> None:
    importlib.import_module("archived.inner")
    jar = archive.rename(archive.with_name("spark-core.jar"))
    of_jar, of_folder = type(sys.path_importer_cache[str(archive)])(str(jar)), object()
    alone = type(of_jar)(f"{jar}/archived")
    finders = {str(jar): of_jar, "/a/folder": of_folder, "/nothing": None}
    forget_archives(finders)
    assert finders == {"/a/folder": of_folder, "/nothing": None}
    # Without the archive's finder, nothing else would update the list of its files.
    only = {f"{archive}/archived": sys.path_importer_cache[f"{archive}/archived"]}
    forget_archives(only)
    assert len(only) == 1
    forget_archives(of_java := {f"{jar}/archived": alone})
    assert of_java == {}
