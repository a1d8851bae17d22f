"""The metadata is in setup.cfg. What depends on the home page is made here: links."""

import re
from configparser import RawConfigParser
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent


def home_page() -> str:
    """Return the ``url`` of setup.cfg, which is empty until the project has a home."""
    config = RawConfigParser()
    config.read(FOLDER / "setup.cfg", encoding="utf-8")
    return config["metadata"]["url"].rstrip("/")


def long_description(home: str) -> str:
    """Return the README with absolute links to files; without a home page, with no such links."""
    text = (FOLDER / "README.rst").read_text(encoding="utf-8")
    image = r"^\.\. (image|figure):: (?!\w+:)(\S+)\n"
    link = r"`([^`<]+?)\s+<(?!\w+:)([^>]+)>`_"
    if home:
        text = re.sub(image, rf".. \1:: {home}/raw/HEAD/\2\n", text, flags=re.M)
        return re.sub(link, rf"`\1 <{home}/blob/HEAD/\2>`_", text)
    text = re.sub(image + r"(?:[ \t]+\S.*\n|\n(?=[ \t]))*", "", text, flags=re.M)
    return re.sub(link, r"\1", text)


def project_urls(home: str) -> dict[str, str]:
    """Return the links of an index beside the home page."""
    pages = {"Documentation": "docs/index.rst", "Changelog": "CHANGELOG.rst"}
    return {name: f"{home}/blob/HEAD/{path}" for name, path in pages.items()} if home else {}


if __name__ == "__main__":
    setup(long_description=long_description(home_page()), project_urls=project_urls(home_page()))
