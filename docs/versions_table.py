"""A Sphinx directive for sets of package versions, from files of pinned packages.

``.. versions:: constraints`` makes a table with a row for each file of a folder in the repository.
The first line of a file is ``# NAME, Python VERSION: DESCRIPTION``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.util.nodes import nested_parse_with_titles

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "PySpark": "pyspark",
    "PyArrow": "pyarrow",
    "NumPy": "numpy",
    "pandas": "pandas",
    "torch": "torch",
    "Lightning": "lightning",
    "Keras": "keras",
    "TensorFlow": "tensorflow",
    "Petastorm": "petastorm",
}
"""Title of a column to the package."""


class VersionSet(NamedTuple):
    """Contents of a file: its title, the version of Python, a description, versions by package."""

    title: str
    python: str
    description: str
    pins: dict[str, str]


def read_versions(file: Path) -> VersionSet:
    """Return the contents of a file of pinned packages."""
    text = file.read_text(encoding="utf-8")
    header = re.match(r"# (.+), Python ([\d.]+): (.+)\n", text)
    if header is None:
        raise ValueError(f"{file} does not begin with '# NAME, Python VERSION: DESCRIPTION'.")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    return VersionSet(*header.groups(), pins)


class Versions(Directive):
    """The sets of versions in a folder: a row for each file, a column for each package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table; a package without a version in any file has no column."""
        folder = self.arguments[0]
        files = sorted((ROOT / folder).glob("*.txt"))
        sets = {file: read_versions(file) for file in files}
        if not sets:
            raise self.error(f"{folder} has no files of pinned packages")
        shown = [
            (title, package)
            for title, package in PACKAGES.items()
            if any(package in versions.pins for versions in sets.values())
        ]
        lines = [".. list-table::", "   :header-rows: 1", ""]
        lines += ["   * - Set", "     - Python", *(f"     - {title}" for title, _ in shown)]
        for file, versions in sets.items():
            environment = self.state.document.settings.env
            environment.note_dependency(str(file))
            lines += [f"   * - {versions.title}, ``{file.name}``: {versions.description}"]
            lines += [f"     - {versions.python}"]
            lines += [f"     - {versions.pins.get(package, 'none')}" for _, package in shown]
        node = nodes.container(classes=["versions"])
        nested_parse_with_titles(self.state, StringList(lines, source=folder), node)
        return node.children


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("versions", Versions)
    return {"parallel_read_safe": True}
