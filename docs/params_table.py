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
    "TrainingParams": "What is trained, and for how long",
    "ColumnParams": "Columns",
    "RankParams": "Ranks",
    "RunParams": "Store and run",
    "CheckpointParams": "Checkpoints",
    "WritingParams": "Writing the data",
    "ReadingParams": "Reading the data",
    "TransformationParams": "Transforming rows",
    "InferenceParams": "Predicting",
    "ClassificationParams": "Columns of a classifier",
    "HistoryParams": "What was measured",
}
"""Class that declares params to the title of its group, in the order of the page."""


def find(name: str) -> Any:
    """Return the object of a dotted name, whose last part is in a module."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def groups_of(cls: Any, without: Any = None) -> dict[str, dict[str, Any]]:
    """Return title to the declarations of a group, by the class that declares them last."""
    found: dict[str, dict[str, Any]] = {title: {} for title in GROUPS.values()}
    left_out = getattr(without, "_declarations", {})
    for name, declaration in cls._declarations.items():
        if left_out.get(name) is declaration or name.startswith("_"):
            continue
        owner = next(c for c in cls.__mro__ if vars(c).get(name) is not None and name in vars(c))
        title = GROUPS.get(owner.__name__, "Of this class")
        found.setdefault(title, {})[name] = declaration
    own = found.pop("Of this class", {})
    ordered = {"Of this class": own, **found} if own else found
    return {title: group for title, group in ordered.items() if group}


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
