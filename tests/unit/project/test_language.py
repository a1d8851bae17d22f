"""Rules of CONTRIBUTING for language and file names that a program can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvd_estimators

PACKAGE = Path(hvd_estimators.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

OPENINGS = re.compile(
    r"(What|Who|Whoever|Whether|Where|Which|Tell|Say|Return (what|who|where|which)|"
    r"Return (how much|how many))\b"
)
"""Wrong first words: a docstring opens with an imperative or a noun."""

BANNED = re.compile(
    r"\b(mend(s|ed|ing)?|anew|nobody|gone on|for ever|that of|those of|told|of its own|who has it|"
    r"at most so|all the same|for want of|whoever|hence|thus|take down|taken down)\b",
    re.IGNORECASE,
)
"""Words that are banned on pages and in docstrings and messages."""

BANNED_IN_CODE = re.compile(r"\b(as they are|none of|house|rooms?|road)\b", re.IGNORECASE)
"""Words that are also banned in docstrings and comments; see ``docs/architecture.rst``."""

ROOT = PACKAGE.parent
PAGES = [
    *sorted((ROOT / "docs").rglob("*.rst")),
    *(ROOT / name for name in ("README.rst", "CONTRIBUTING.rst", "CHANGELOG.rst")),
    *(ROOT / name / "README.rst" for name in ("benchmarks", "deploy", "examples")),
]

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
    """Return a text without its literals, which are names rather than words, in one line."""
    return " ".join(re.sub(r"``[^`]*``|`[^`]*`", "", text).split())


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings in a file, docstrings included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


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
        for banned in (BANNED, BANNED_IN_CODE)
        if (match := banned.search(prose(text)))
    ]
    assert found == []


def test_messages_avoid_banned_words() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {match.group()}"
        for path in FILES
        for line, text in messages(path)
        if (match := BANNED.search(prose(text)))
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_avoid_banned_words(page: Path) -> None:
    text = prose(page.read_text(encoding="utf-8"))
    found = [text[max(match.start() - 60, 0) : match.end() + 30] for match in BANNED.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("wrong", "better"),
    [
        ("The gradient is that of the loss.", "It is the gradient of the loss."),
        ("Nobody is told of it.", "It is not reported."),
        ("It starts anew,\nat most so often.", "It restarts up to 5 times."),
    ],
)
def test_banned_words_are_found(wrong: str, better: str) -> None:
    assert BANNED.search(prose(wrong))
    assert not BANNED.search(prose(better))


def test_file_names_are_consistent_between_frameworks() -> None:
    """The same role has the same file name in the packages of torch, Keras and Lightning."""
    roles = {"estimator", "framework", "settings", "trainer", "checkpoint", "model", "predictor"}
    for framework in ("torch", "keras", "lightning"):
        names = {path.stem for path in (PACKAGE / framework).glob("*.py")}
        assert roles <= names, framework


def test_few_files_are_small() -> None:
    """A file holds one concept that a newcomer would look for."""
    sizes = Counter(path.stem == "__init__" for path in FILES)
    assert sizes[False] + sizes[True] <= 280
