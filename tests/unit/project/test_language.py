"""Rules of CONTRIBUTING for docstrings and file names that a program can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hvd_estimators

PACKAGE = Path(hvd_estimators.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

OPENINGS = re.compile(
    r"(What|Who|Whoever|Whether|Where|Which|Tell|Say|Return (what|who|where|which)|"
    r"Return (how much|how many))\b"
)
"""Wrong first words: a docstring opens with an imperative or a noun."""

BANNED = re.compile(
    r"\b(mend(s|ed|ing)?|anew|nobody|gone on|for ever|of its own|as they are|who has it|none of|"
    r"house|rooms?|road|take down|taken down|told)\b",
    re.IGNORECASE,
)
"""Banned words; see the vocabulary in ``docs/architecture.rst``."""

MOST_WORDS = 20
"""Maximum number of words in the first sentence of a docstring."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings in a file, strings below constants included."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", [])
        for entry in body if isinstance(body, list) else []:
            if (
                isinstance(entry, ast.Expr)
                and isinstance(entry.value, ast.Constant)
                and isinstance(entry.value.value, str)
            ):
                yield entry.lineno, entry.value.value


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the comments in a file."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose(text: str) -> str:
    """Return a text without its literals, which are names rather than words."""
    return re.sub(r"``[^`]*``|`[^`]*`", "", text)


def test_docstrings_open_with_an_imperative_or_a_noun() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {text.splitlines()[0]}"
        for path in FILES
        for line, text in docstrings(path)
        if OPENINGS.match(text)
    ]
    assert found == []


def test_first_sentences_are_short() -> None:
    found = []
    for path in FILES:
        for line, text in docstrings(path):
            first = re.split(r"(?<=[.:])\s|\n\n", text, maxsplit=1)[0]
            if len(first.split()) > MOST_WORDS + 5:
                found.append(f"{path.relative_to(PACKAGE)}:{line} {first}")
    assert found == []


def test_docstrings_and_comments_avoid_banned_words() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {match.group()}"
        for path in FILES
        for line, text in (*docstrings(path), *comments(path))
        if (match := BANNED.search(prose(text)))
    ]
    assert found == []


def test_file_names_are_consistent_between_frameworks() -> None:
    """The same role has the same file name in the packages of torch, Keras and Lightning."""
    roles = {"params", "estimator", "trainer", "checkpoint", "model", "predictor"}
    for framework in ("torch", "keras", "lightning"):
        names = {path.stem for path in (PACKAGE / framework).glob("*.py")}
        assert roles <= names, framework


def test_few_files_are_small() -> None:
    """A file holds one concept that a newcomer would look for."""
    sizes = Counter(path.stem == "__init__" for path in FILES)
    assert sizes[False] + sizes[True] <= 275
