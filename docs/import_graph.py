"""A Sphinx directive that draws which packages import which, read from the source.

``.. import-graph::`` draws a row for each layer. A line leads from a package down to one that it
imports. Lines that follow from others, through a package between, are left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "tests" / "unit" / "project" / "test_import_rules.py"
SOURCES = ROOT / "hvd_estimators"

WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT = 760, 76, 150, 30
NAMES = {
    "estimator": "estimator, fitting, params, model, inference, saving",
    "base": "_util, exceptions",
}
"""Labels of groups of packages that import each other's modules."""

COLUMNS = {"commands": 0.88}
"""Places from left (0) to right (1) where the middle would hide a line."""


def load_rules() -> Any:
    """Return the module with the rules that the tests check."""
    spec = importlib.util.spec_from_file_location("import_rules", RULES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def package_imports(rules: Any) -> dict[str, set[str]]:
    """Return the packages that each package imports."""
    imports = rules.read_imports(SOURCES)
    graph: dict[str, set[str]] = {name: set() for layer in rules.LAYERS for name in layer}
    for module, entries in imports.items():
        for entry in entries:
            if entry.name in imports and rules.package(entry.name) != rules.package(module):
                graph[rules.package(module)].add(rules.package(entry.name))
    return graph


def direct_imports(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return a graph without the edges that follow from a longer path."""

    def reachable(name: str) -> set[str]:
        return graph[name].union(*map(reachable, graph[name]))

    return {
        name: {target for target in targets if not any(target in reachable(o) for o in targets)}
        for name, targets in graph.items()
    }


def draw(layers: Sequence[Sequence[str]], graph: Mapping[str, set[str]]) -> str:
    """Return the picture as SVG."""
    centers, widths = {}, {}
    for row, layer in enumerate(layers):
        for column, name in enumerate(layer):
            widths[name] = max(BOX_WIDTH, 8 * len(NAMES.get(name, name)) + 24)
            x = COLUMNS.get(name, (column + 0.5) / len(layer)) * WIDTH
            centers[name] = (x, ROW * row + BOX_HEIGHT)

    def end(name: str, target: str) -> float:
        """Return the point of the target's box that is nearest to the importing package."""
        x, half = centers[target][0], widths[target] / 2 - 15
        return min(max(centers[name][0], x - half), x + half)

    lines = [
        f'<line x1="{centers[name][0]:g}" y1="{centers[name][1] + BOX_HEIGHT / 2:g}" '
        f'x2="{end(name, target):g}" y2="{centers[target][1] - BOX_HEIGHT / 2:g}" />'
        for name, targets in graph.items()
        for target in sorted(targets)
    ]
    boxes = [
        f'<rect x="{x - widths[name] / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{widths[name]}" '
        f'height="{BOX_HEIGHT}" rx="6" /><text x="{x:g}" y="{y + 5:g}">'
        f"{escape(NAMES.get(name, name))}</text>"
        for name, (x, y) in centers.items()
    ]
    height = ROW * len(layers)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        'aria-label="Imports of the packages, from top to bottom">'
        f'<g stroke="currentColor" stroke-opacity="0.55">{"".join(lines)}</g>'
        '<g fill="var(--color-background-secondary, #f8f9fb)" stroke="currentColor" '
        'font-family="monospace" font-size="13" text-anchor="middle">'
        f"{''.join(boxes)}</g></svg>"
    ).replace("<text ", '<text stroke="none" style="fill: currentColor" ')


class ImportGraph(Directive):
    """The imports of the packages, as a picture."""

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        rules = load_rules()
        picture = draw(rules.LAYERS, direct_imports(package_imports(rules)))
        node = nodes.container(classes=["import-graph"])
        node += nodes.raw("", picture, format="html")
        return [node]


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("import-graph", ImportGraph)
    return {"parallel_read_safe": True}
