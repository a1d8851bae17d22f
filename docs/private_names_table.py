"""A Sphinx directive for the private names of other packages, from the tests' tables.

``.. private-names:: keras`` makes a table of the names whose module begins with ``keras``, and
``.. private-names:: jvm`` one of the names in Spark's JVM. An owner is in the first group that a
page names for it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.util.nodes import nested_parse_with_titles

TESTS = Path(__file__).resolve().parent.parent / "tests"
TABLE = "helpers/private_names.py"
JVM_TABLE = "spark/test_spark_names.py"


def load_table(file: str) -> Any:
    """Return ``TABLE`` of a module of the tests."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, TESTS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TABLE


def rows_of(groups: list[str]) -> list[tuple[str, str, str]]:
    """Return owner, names and purpose of each row of some groups."""
    if groups == ["jvm"]:
        return [(owner, names, f"{why}.") for owner, names, _, why in load_table(JVM_TABLE)]
    return [
        (row.owner.split()[0], row.names, row.why)
        for row in load_table(TABLE)
        if row.owner.partition(".")[0] in groups
    ]


class PrivateNames(Directive):
    """The private names of some packages: owner, names, purpose."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return a table with a row for each owner and purpose."""
        lines = [".. list-table::", "   :header-rows: 1", "   :widths: 50 50", ""]
        lines += ["   * - Names", "     - Purpose"]
        rows = rows_of(self.arguments[0].split())
        if not rows:
            raise self.error(f"no private names of {self.arguments[0]}")
        for owner, names, why in rows:
            listed = ", ".join(f"``{name}``" for name in names.split())
            lines += [f"   * - ``{owner}``: {listed}"]
            lines += [f"     - {why[0].upper()}{why[1:]}"]
        node = nodes.container(classes=["private-names"])
        nested_parse_with_titles(self.state, StringList(lines, source=self.arguments[0]), node)
        return node.children


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("private-names", PrivateNames)
    return {"parallel_read_safe": True}
