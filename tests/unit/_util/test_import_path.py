"""Import paths without folders that other users of the machine can write to."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_estimators._util.import_path import python_code, python_module, python_path
from hvd_estimators.commands.doctor import run_python
from hvd_estimators.launch import LocalBackend

pytestmark = pytest.mark.timeout(60)

OTHERS = 4712


def folder_of(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of some kind, or a file or link."""
    path = tmp_path / "above" / "scripts"
    path.mkdir(parents=True)
    path.chmod(0o755)
    path.parent.chmod(0o755)
    if kind in ("below a folder like /tmp", "below a folder of all"):
        path.parent.chmod(0o1777 if "like" in kind else 0o777)
    elif kind in ("of my own group", "of a group"):
        path.chmod(0o775)
        user = pwd.struct_passwd(("me", "x", os.geteuid(), os.getegid(), "", "/", ""))
        members = ["other"] if kind == "of a group" else ["me"]
        group = grp.struct_group(("me", "x", os.getegid(), members))
        monkeypatch.setattr(pwd, "getpwuid", lambda number: user)
        monkeypatch.setattr(grp, "getgrgid", lambda number: group)
    elif kind == "an archive":
        (path / "modules.zip").write_bytes(b"")
        path /= "modules.zip"
    elif kind == "an archive of all":
        path = path / "modules.zip"
        path.write_bytes(b"")
        path.chmod(0o666)
    elif kind.startswith("a link"):
        link = tmp_path / "link"
        if kind.endswith("through a folder of all"):
            (tmp_path / "public").mkdir()
            (tmp_path / "public").chmod(0o777)
            (tmp_path / "public" / "link").symlink_to(path)
            link.symlink_to("public/link")
        else:
            link.symlink_to("above/scripts")
        path = link
    elif kind in ("of all", "like /tmp"):
        path.chmod(0o777 if kind == "of all" else 0o1777)
    elif kind == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        if not os.getuid():
            os.chown(path, OTHERS, -1)
    return path


SAFE = ["plain", "below a folder like /tmp", "of my own group", "an archive", "a link"]
UNSAFE = [
    *("of all", "like /tmp", "below a folder of all", "of a group", "of another user"),
    *("an archive of all", "a link through a folder of all"),
]


@pytest.mark.parametrize("kind", [*SAFE, *UNSAFE])
def test_only_what_this_user_and_root_can_change_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    entry = str(folder_of(tmp_path, kind, monkeypatch))
    missing = str(tmp_path / "missing")
    with caplog.at_level(logging.WARNING):
        found = python_path(["", entry], [entry, missing])
    assert found.split(os.pathsep).count(entry) == (kind in SAFE)
    assert missing not in found
    assert (f"{entry} is left out" in caplog.text) == (kind in UNSAFE)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Return a folder, open to all, whose modules leave a mark; one is the user's own."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("sitecustomize", "cloudpickle", "psutil"):
        program = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n"
        (folder / f"{name}.py").write_text(program)
    (folder / "module_of_mine.py").write_text("VALUE = 3\n")
    folder.chmod(0o777)
    return folder


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("place", ["path", "working directory"])
def test_planted_modules_do_not_run_in_ranks(
    planted: Path, monkeypatch: pytest.MonkeyPatch, place: str, warm_start: bool
) -> None:
    if place == "path":
        monkeypatch.setattr(sys, "path", [str(planted), *sys.path])
    else:
        monkeypatch.chdir(planted)
    mark = planted.parent / "ran"

    assert LocalBackend(1, warm_start=warm_start).run(int) == [0]
    assert not mark.exists()
    # In a folder that others cannot write to, they are the user's own.
    planted.chmod(0o755)
    for name in ("cloudpickle", "psutil"):
        (planted / f"{name}.py").unlink()
    monkeypatch.setattr(sys, "path", [str(planted), *sys.path])

    def work() -> int:
        import module_of_mine  # type: ignore[import-not-found]

        return int(module_of_mine.VALUE)

    assert LocalBackend(1, warm_start=warm_start).run(work) == [3]
    assert mark.read_text().startswith("sitecustomize")


def test_programs_do_not_import_from_the_working_directory(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(planted)
    code = "import psutil, sys; print(sys.argv[1:], __name__, psutil.__file__)"

    def output(*command: str) -> Any:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert "site-packages" in run_python(code, seconds=60)
    assert output(*python_code(code), "a b")[:3] == ["['a", "b']", "__main__"]
    monkeypatch.setenv("PYTHONPATH", str(planted))
    (planted / "program.py").write_text(code)
    assert output(*python_module("program"), "a")[:2] == ["['a']", "__main__"]
    assert output(*python_module("program"))[2] == str(planted / "psutil.py")
