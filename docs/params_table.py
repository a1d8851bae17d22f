"""A Sphinx directive for the params of an estimator or a model, from their declarations.

``.. params:: hvd_estimators.torch.TorchEstimator`` makes a definition list for each group of
params; ``:without:`` leaves out those that another class has.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

GROUPS = {
    "model": "What is trained, and for how long",
    "feature_cols": "Columns",
    "num_proc": "Ranks",
    "store": "Store and run",
    "checkpoint_every_n_steps": "Checkpoints",
    "validation": "Writing the data",
    "shuffle_buffer_size": "Reading the data",
    "transformation_fn": "Transforming rows",
    "outputs": "Predicting",
    "predictionCol": "Columns of a classifier",
}
"""First declared param to the title of its group, in the order of the page."""

_SHARED = ("EstimatorParams", "SharedParams")
"""Classes that declare params in groups."""


def find(name: str) -> Any:
    """Return the object of a dotted name, whose last part is in a module."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def groups_of(cls: Any, without: Any = None) -> dict[str, dict[str, Any]]:
    """Return title to the declarations of a group; a class's own params come first."""
    found: dict[str, dict[str, Any]] = {title: {} for title in ("Of this class", *GROUPS.values())}
    left_out = getattr(without, "_declarations", {})
    shared = {k: c for c in cls.__mro__ if c.__name__ in _SHARED for k in vars(c)}
    title = ""
    for name, declaration in cls._declarations.items():
        title = GROUPS.get(name, title) if name in shared else "Of this class"
        if left_out.get(name) is declaration or name.startswith("_"):
            continue
        owner = next(c for c in cls.__mro__ if name in vars(c))
        found[title if owner.__name__ in _SHARED else "Of this class"][name] = declaration
    return {title: group for title, group in found.items() if group}


def as_text(document: str) -> str:
    """Return a param's documentation, which is plain text, with what would be markup escaped."""
    for mark in ("\\", "*", "`", "|"):
        document = document.replace(mark, "\\" + mark)
    return document.replace("_", "\\_")


class ParamsTable(SphinxDirective):
    """The params of a class, in groups: name, type, default, what it means.

    Each is an attribute of its class, with an anchor and an entry in the index.
    """

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"without": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the groups, each below a line."""
        cls = find(self.arguments[0])
        without = find(self.options["without"]) if "without" in self.options else None
        lines = []
        for title, group in groups_of(cls, without).items():
            lines += [f".. rubric:: {title}", ""]
            for name, declaration in group.items():
                lines += [f".. py:attribute:: {name}"]
                if declaration.accepted_type != "Any":
                    lines += [f"   :type: {declaration.accepted_type}"]
                if declaration.default is not None:
                    lines += [f"   :value: {declaration.default!r}"]
                lines += ["", f"   {as_text(declaration.doc)}", ""]
        node = nodes.container(classes=["params"])
        # Within a class, its attributes are shown by their own names.
        module, _, class_name = self.arguments[0].rpartition(".")
        within = {"py:module": module, "py:class": class_name, "py:classes": [class_name]}
        with mock.patch.dict(self.env.ref_context, within):
            nested_parse_with_titles(self.state, StringList(lines, source=self.arguments[0]), node)
        return [node]


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("params", ParamsTable)
    return {"parallel_read_safe": True}
