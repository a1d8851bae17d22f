"""The documentation builds without warnings; its names, links and blocks are valid."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_site_builds_without_warnings_or_broken_links(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    pytest.importorskip("torch")
    pytest.importorskip("keras")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(tmp_path / "html")],
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    broken = []
    for page in (tmp_path / "html").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match(r"\w+:|//", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name.partition("?")[0]).resolve() if name else page
            there = target.is_file() and (
                not anchor or f'id="{anchor}"' in target.read_text(encoding="utf-8")
            )
            if not there:
                broken.append((page.name, link))
    assert not broken
    _check_params(tmp_path / "html")
    _check_search(tmp_path / "html")


def _check_search(site: Path) -> None:
    """Check that headings have users' words, and that the search omits decision records."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    pages = index["docnames"]
    headings = {
        (title.lower(), pages[number])
        for title, places in index["alltitles"].items()
        for number, _ in places
    }
    wanted = [
        ("hyperparameter", "estimators"),
        *(("early stopping", page) for page in ("torch", "keras", "lightning")),
        *(("gradient clipping", page) for page in ("torch", "keras")),
        ("venv-pack", "deploy/index"),
        ("docker", "install"),
        ("serving", "inference"),
        ("signature", "runs"),
    ]
    missing = [
        (words, page)
        for words, page in wanted
        if not any(words in title and page == place for title, place in headings)
    ]
    assert missing == []
    tables = [*index["terms"].values(), *index["titleterms"].values()]
    found = {pages[n] for hits in tables for n in (hits if isinstance(hits, list) else [hits])}
    found |= {page for _, page in headings}
    assert {"estimators", "api/params"} <= found
    assert [page for page in found if page.startswith("decisions")] == []
    assert (site / "decisions" / "training.html").is_file()


def _check_params(site: Path) -> None:
    """Check that each param has an anchor and an entry in the index, on the page of its class."""
    from hvd_estimators.keras import KerasEstimator, KerasModel
    from hvd_estimators.lightning import LightningEstimator, LightningModel
    from hvd_estimators.torch import TorchEstimator, TorchModel

    # Params that models share with estimators are listed once, with those of estimators.
    common = ["estimator.HorovodEstimator", "model.HorovodModel"]
    index = (site / "genindex.html").read_text(encoding="utf-8")
    anchors = {
        anchor
        for page in (site / "api").glob("*.html")
        for anchor in re.findall(r'<dt class="sig[^>]* id="([\w.]+)"', page.read_text())
        if f'#{anchor}"' in index
    }
    documented = {
        KerasEstimator: ["keras.KerasEstimator"],
        KerasModel: ["keras.KerasModel"],
        TorchEstimator: ["torch.TorchEstimator"],
        TorchModel: ["torch.TorchModel"],
        LightningEstimator: ["lightning.LightningEstimator", "torch.TorchEstimator"],
        LightningModel: ["lightning.LightningModel", "torch.TorchModel"],
    }
    missing = [
        (cls.__name__, name)
        for cls, own in documented.items()
        for name in cls._declarations
        if not name.startswith("_")
        and not any(f"hvd_estimators.{each}.{name}" in anchors for each in [*own, *common])
    ]
    assert missing == []


def _messages() -> str:
    """Return this package's strings, one per line, with ``…`` for formatted values."""
    lines = []
    for source in (ROOT / "hvd_estimators").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                lines.append("".join(p if isinstance(p, str) else "…" for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
    return "\n".join(lines)


def test_messages_explained_in_the_documentation_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.rst").read_text(encoding="utf-8")
    first_cells = "\n".join(line for line in page.split("\n") if line.startswith("   * - "))
    cells = re.findall(r"``(?:\w+Error: )?([^`\n]+)``", first_cells)
    said = _messages()
    missing = []
    for cell in cells:
        # Placeholders of values: a name in quotes, a number, an ellipsis.
        for part in re.split(r"…|'[^']*'|\b\d+\b|^\w+: |=\d", cell):
            text = part.strip(" .:(,")
            if len(text) > 3 and " " in text and text not in said:
                missing.append((cell, text))
    assert not missing


def test_the_readme_renders_on_package_indexes_and_its_files_exist() -> None:
    core = pytest.importorskip("docutils.core")
    text = (ROOT / "README.rst").read_text(encoding="utf-8")
    # Raise on warnings. PyPI inserts no files, either.
    settings = {"halt_level": 2, "report_level": 5, "file_insertion_enabled": False}
    core.publish_string(text, writer="null", settings_overrides=settings)
    files = re.findall(r"`[^`]*<([\w./]+)>`_|^\.\. image:: (\S+)", text, re.MULTILINE)
    assert len(files) > 20
    assert [name for name in map("".join, files) if not (ROOT / name).is_file()] == []
