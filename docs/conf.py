"""How Sphinx builds the documentation: ``make docs``, without a network and without warnings."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import hvd_estimators  # noqa: E402
from hvd_estimators.params import DeclaredParams  # noqa: E402

project = "hvd_estimators"
author = "the authors of hvd_estimators"
copyright = "the authors of hvd_estimators"
version = release = hvd_estimators.__version__

extensions = [
    "import_graph",
    "params_table",
    "private_names_table",
    "versions_table",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
# `name` is a name of Python's, as in the docstrings; those that lead nowhere are shown as code.
default_role = "py:obj"
highlight_language = "none"
nitpicky = False
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"hvd_estimators {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sphinx = False
html_copy_source = False
templates_path: list[str] = []

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# A long signature has one parameter a line.
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _without_params(app, what, name, obj, options, lines) -> None:  # type: ignore[no-untyped-def]
    """Leave the params out of a class's text: they have a table of their own."""
    if what == "class" and isinstance(obj, type) and issubclass(obj, DeclaredParams):
        text = "\n".join(lines)
        for mark in ("\nParameters\n----------\n", "\n:Parameters:", "\n:param "):
            text = text.partition(mark)[0]
        lines[:] = [*text.split("\n"), ""]


def _leave_out_of_search(app, doctree) -> None:  # type: ignore[no-untyped-def]
    """Leave decision records out of the search: they explain the code, not its use."""
    if app.env.docname.startswith("decisions/"):
        app.env.metadata[app.env.docname]["nosearch"] = ""


def setup(app) -> None:  # type: ignore[no-untyped-def]
    """Connect the handlers; docstrings are changed before napoleon reads them."""
    app.connect("doctree-read", _leave_out_of_search)
    app.connect("autodoc-process-docstring", _without_params, priority=100)
