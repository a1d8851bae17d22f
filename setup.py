"""The metadata is in setup.cfg; only what package indexes show is made here, and comes first."""

import re
from pathlib import Path

from setuptools import setup


def long_description() -> str:
    """Return the README without pictures and links that only a clone has."""
    text = (Path(__file__).parent / "README.rst").read_text(encoding="utf-8")
    text = re.sub(r"and draws\n\n\.\. image:: (?!\w+:).*\n(?: +:.*\n)*\n", "", text)
    return re.sub(r"`([^`<]+?)\s+<(?!\w+:)[^>]+>`_", r"\1", text)


setup(long_description=long_description())
