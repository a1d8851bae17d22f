"""Python blocks of the documentation as code, with the output that pages show."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NEEDS_MORE = "needs-more"
"""Class of a block that needs a cluster, a GPU, a server or minutes: it is not run."""


@dataclass(frozen=True)
class Block:
    """A ``code-block:: python`` with its position on its page.

    Attributes
    ----------
    page : Path
        The page.
    line : int
        Its first line.
    text : str
        Its code.
    runs : bool
        Whether it can be run.
    shown : str
        The literal block (``::``) that follows it, before another block of code: its output.
        Empty if there is none.
    """

    page: Path
    line: int
    text: str
    runs: bool
    shown: str

    @property
    def tree(self) -> ast.Module:
        """Return the parsed code, with the page and lines for tracebacks."""
        tree = ast.parse(self.text, str(self.page))
        return ast.increment_lineno(tree, self.line - 1)


def pages() -> list[Path]:
    """Return the pages that have Python blocks."""
    found = [ROOT / "README.rst", *sorted((ROOT / "docs").glob("*.rst"))]
    return [page for page in found if blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    """Return the Python blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").split("\n")
    return list(_blocks(page, lines))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    for number, line in enumerate(lines):
        head = re.fullmatch(r"( *)\.\. code-block:: python", line)
        if not head:
            continue
        body = []
        for following in lines[number + 1 :]:
            if following.strip() and not following.startswith(head[1] + "   "):
                break
            body.append(following)
        options = [text for text in body if re.match(r" +:\w+:", text)]
        start = len(options) and body.index(options[-1]) + 1
        text = textwrap.dedent("\n".join(body[start:]))
        runs = not any(NEEDS_MORE in option for option in options)
        shown = _literal(lines[number + 1 + len(body) :])
        yield Block(page, number + 2 + start, text, runs, shown)


def _literal(lines: list[str]) -> str:
    """Return the first literal block, if it comes before any directive."""
    for number, line in enumerate(lines):
        if line.lstrip().startswith(".. "):
            break
        if line.endswith("::"):
            rest = lines[number + 1 :]
            inside = itertools.takewhile(lambda text: not text.strip() or text[0] == " ", rest)
            return textwrap.dedent("\n".join(inside)).strip()
    return ""


def prints(shown: str, printed: str) -> bool:
    """Return whether printed text contains the lines that a page shows, one after the other.

    ``...`` stands for any text, and white space for any other white space. A speed (``2,109
    rows/s``) matches any speed. A number with a fraction matches one that differs by at most
    0.1: each loss depends on how Spark splits rows, and so on the number of task slots.
    """
    parts = re.split(r"(\.\.\.|\s+|[\d,]+(?= rows/s)|\d+\.\d+(?!\d*\.\.\.))", shown)
    pattern, numbers = "", []
    for plain, special in itertools.zip_longest(parts[::2], parts[1::2], fillvalue=""):
        pattern += re.escape(plain)
        if special == "...":
            pattern += r"(?s:.*?)"
        elif special.isspace():
            pattern += r"\s+"
        elif "." in special:
            pattern += r"(\d+\.\d+)"
            numbers.append(float(special))
        elif special:
            pattern += r"[\d,]+"
    return any(
        all(abs(float(f) - n) <= 0.1 for f, n in zip(found.groups(), numbers, strict=True))
        for found in re.finditer(pattern, printed)
    )


def names_wanted(blocks: list[Block]) -> set[str]:
    """Return the names that a block reads and that no earlier block defines."""
    made, wanted = set(vars(builtins)), set()
    for block in blocks:
        stored = {
            node.id
            for node in ast.walk(block.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(block.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                stored |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                stored.add(node.name)
            if isinstance(node, ast.arg):
                stored.add(node.arg)
        read = {
            node.id
            for node in ast.walk(block.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        wanted |= read - made - stored
        # A block also needs the names that it overwrites, as in df = df.select().
        wanted |= _read_first(block.tree) - made
        made |= stored
    return wanted


def names_made(blocks: list[Block]) -> set[str]:
    """Return the names that blocks assign."""
    nodes = [node for block in blocks for node in ast.walk(block.tree)]
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _read_first(tree: ast.Module) -> set[str]:
    """Return the names that a block's statements read before they define them."""
    made: set[str] = set()
    found: set[str] = set()
    for statement in tree.body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        loops = [node.target for node in ast.walk(statement) if isinstance(node, ast.comprehension)]
        made |= {n.id for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Name)}
        if isinstance(statement, (ast.Assign, ast.Expr)):
            found |= {n.id for n in names if isinstance(n.ctx, ast.Load)} - made
        made |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                made |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
    return found


def check_imports(block: Block, namespace: dict[str, Any]) -> None:
    """Run the imports of a block, at any depth."""
    for node in ast.walk(block.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(compile(ast.Module([node], []), str(block.page), "exec"), namespace)


def check_keywords(block: Block, names: Mapping[str, Any]) -> None:
    """Check that this package's callables accept the keywords in a block."""
    for node in ast.walk(block.tree):
        if not isinstance(node, ast.Call):
            continue
        called = _resolved(node.func, names)
        ours = getattr(called, "__module__", "").startswith("hvd_estimators")
        if called is None or not ours or not callable(called):
            continue
        parameters = inspect.signature(called).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            continue
        for keyword in node.keywords:
            assert keyword.arg is None or keyword.arg in {p.name for p in parameters}, (
                f"{block.page}:{node.lineno}: {ast.unparse(node.func)} has no {keyword.arg!r}"
            )


def _resolved(function: ast.expr, names: Mapping[str, Any]) -> Callable[..., Any] | None:
    if isinstance(function, ast.Name):
        return names.get(function.id)
    if isinstance(function, ast.Attribute):
        owner = _resolved(function.value, names)
        return getattr(owner, function.attr, None) if owner is not None else None
    return None
