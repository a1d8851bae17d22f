"""Draws the README's picture: runs its example and puts the file into ``docs/_static``.

``python docs/picture.py``, in an environment of ``make setup``, prints what the example prints.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run the example in a folder of its own."""
    readme = (ROOT / "README.rst").read_text(encoding="utf-8")
    found = re.search(r"^\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)", readme, re.MULTILINE)
    assert found, "the README has no Python block"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        code = textwrap.dedent(found[1]).replace("/tmp/experiments", folder)
        exec(compile(code, "README.rst", "exec"), {"__name__": "__main__"})
        shutil.copy("digits.png", ROOT / "docs" / "_static" / "digits.png")


if __name__ == "__main__":
    main()
