"""Runs the Python blocks of a page in order, and compares what they print with what the page shows.

    .venv/bin/python tests/documents.py docs/tutorial.md             # one page, by hand
    .venv/bin/python tests/documents.py --write docs/tutorial.md     # and put what it prints into the page

A page speaks to this file in HTML comments, which readers do not see. Each stands alone on a line.

    <!-- after: tutorial.md -->      the page uses names that the blocks of another page made; that page runs first
    <!-- own process -->             the page registers rules, which other tests must not see
    <!-- slow -->                    the page takes more than a few seconds
    <!-- not run: why -->            the next block cannot run here
    <!-- needs: module -->           the next block runs if this module is installed
    <!-- output -->                  the next block is what the last Python block printed
    <!-- output of one run: why -->  the same, but another run prints something else
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARK = r"(?:^<!-- (?P<mark>not run: [^\n]+?|needs: \S+|output|output of one run: [^\n]+?) -->\n+)?"
FENCE = re.compile(MARK + r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
AFTER = re.compile(r"^<!-- after: (\S+) -->$", re.M)
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: `line` is that of its first line of text."""

    language: str
    text: str
    line: int
    mark: str


def pages() -> list[Path]:
    """All pages of the repository that hold Python blocks."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if any(block.language == "python" for block in blocks(page.read_text()))]


def blocks(page: str) -> list[Block]:
    return [
        Block(m["language"], m["text"], page[: m.start("text")].count("\n") + 1, m["mark"] or "")
        for m in FENCE.finditer(page)
    ]


def runs(block: Block) -> bool:
    """Whether a Python block can run here."""
    kind, _, rest = block.mark.partition(": ")
    return not kind or (kind == "needs" and importlib.util.find_spec(rest) is not None)


def says(page: Path, mark: str) -> bool:
    """Whether a page has a comment that is about all of it."""
    return f"\n<!-- {mark} -->\n" in page.read_text()


def run(page: Path) -> dict[Block, str]:
    """Run a page in a new folder; for each block that shows output, what was printed."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return _run(page, {"__name__": "__main__"})
        finally:
            os.chdir(before)


def _run(page: Path, names: dict[str, Any]) -> dict[Block, str]:
    text, printed, shown = page.read_text(), "", {}
    for other in AFTER.findall(text):
        _run((page.parent / other).resolve(), names)
    for block in blocks(text):
        if block.mark.startswith("output"):
            shown[block] = printed
        elif block.language == "python" and runs(block):
            # empty lines before it, so that an error names the line of the page
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(code, names)
            printed = out.getvalue()
    return shown


def check(page: Path) -> None:
    """Run a page; an AssertionError if it prints something else than it shows."""
    for block, printed in run(page).items():
        assert block.mark != "output" or alike(printed, block.text), (
            f"{page.name}, line {block.line}: the page shows\n{block.text}\nbut its code printed\n{printed}"
        )


def write(page: Path) -> None:
    """Run a page, and put what it printed into its blocks of output."""
    lines = page.read_text().splitlines(keepends=True)
    for block, printed in reversed(run(page).items()):
        lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [printed.rstrip() + "\n"]
    page.write_text("".join(lines))


def alike(printed: str, shown: str) -> bool:
    """The same words, and numbers that differ by no more than other processors and threads make them differ."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(math.isclose(_number(a), _number(b), rel_tol=0.05, abs_tol=0.011) for a, b in pairs)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


if __name__ == "__main__":
    writing = "--write" in sys.argv
    for name in sys.argv[1:]:
        if name != "--write":
            (write if writing else check)(Path(name).resolve())
