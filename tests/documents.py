"""Runs the Python blocks of a page in order, and compares what they print with what the page shows.

    .venv/bin/python tests/documents.py docs/tutorial.md             # one page, by hand
    .venv/bin/python tests/documents.py --write docs/tutorial.md     # and put what it prints and draws into the page

A figure that a page saves under a name (`plt.savefig("digits.svg")`) and shows from its folder of images
(`![...](images/digits.svg)`) is put there with `--write`, and otherwise has to be there.

What a page registers (rules, moments, links, likelihoods) and the default type that it sets are forgotten when it ends.

A page speaks to this file in HTML comments, which readers do not see. Each stands alone on a line.

    <!-- after: tutorial.md -->      the page uses names that the blocks of another page made; that page runs first
    <!-- enough for others -->       up to here, if it says so: what follows takes time and is of no use to others
    <!-- slow -->                    the page takes more than a few seconds
    <!-- rough -->                   its numbers come from networks that other processors train a little differently
    <!-- not run: why -->            the next block cannot run here
    <!-- needs: module -->           the next block runs if this module is installed
    <!-- output -->                  the next block is what the last Python block printed
    <!-- output of one run: why -->  the same, but another run prints something else
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
MARK = r"(?:^<!-- (?P<mark>not run: [^\n]+?|needs: \S+|output|output of one run: [^\n]+?) -->\n+)?"
FENCE = re.compile(MARK + r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
ENOUGH = "\n<!-- enough for others -->\n"
AFTER = re.compile(r"^<!-- after: (\S+) -->$", re.M)
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?")
FIGURE = re.compile(r"!\[[^\]]*\]\(images/([\w-]+\.(?:svg|png))\)")
# how figures of all pages look; text stays text, and the salt gives an SVG file the same ids every time
STYLE = {
    "figure.figsize": (7.0, 3.0),
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "image.interpolation": "none",
    "savefig.dpi": 120,
    "svg.fonttype": "none",
    "svg.hashsalt": "propagauss",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: `line` is that of its first line of text."""

    language: str
    text: str
    line: int
    mark: str


@dataclass(frozen=True)
class Ran:
    """What a page did: what was printed for each block that shows output, and the figures that it saved and shows."""

    shown: dict[Block, str]
    figures: dict[str, bytes]


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


def run(page: Path) -> Ran:
    """Run a page in a new folder."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, _drawing(page), _forgotten():
        os.chdir(folder)
        try:
            shown = _run(page, {"__name__": "__main__"})
            saved = [Path(name) for name in FIGURE.findall(page.read_text()) if Path(name).exists()]
            return Ran(shown, {path.name: path.read_bytes() for path in saved})
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _forgotten() -> Iterator[None]:
    """What can be added to, and the default type, are afterwards what they were before."""
    import torch

    from propagauss.likelihoods.registry import LIKELIHOODS
    from propagauss.links import LINKS
    from propagauss.rules import facts, registry
    from propagauss.rules.elementwise.moments import MOMENTS

    importlib.import_module("propagauss.engines.streamline")  # with all rules of the library
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        for table in (registry.FUNCTIONS, facts._FACTS, MOMENTS, LINKS, LIKELIHOODS):
            stack.enter_context(mock.patch.dict(table))
        yield


@contextlib.contextmanager
def _drawing(page: Path) -> Iterator[None]:
    """Figures in one style, without a screen and without dates in them."""
    if not FIGURE.search(page.read_text()):
        yield
        return
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    with plt.rc_context(STYLE):
        yield
    plt.close("all")


def _run(page: Path, names: dict[str, Any], for_others: bool = False) -> dict[Block, str]:
    text, printed, shown = page.read_text(), None, {}
    for other in AFTER.findall(text):
        _run((page.parent / other).resolve(), names, for_others=True)
    for block in blocks(text.partition(ENOUGH)[0] if for_others else text):
        if block.mark.startswith("output"):
            if printed is not None:
                shown[block] = printed
        elif block.language == "python" and not runs(block):
            printed = None
        elif block.language == "python":
            # empty lines before it, so that an error names the line of the page
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(code, names)
            printed = out.getvalue()
    return shown


def check(page: Path) -> None:
    """Run a page; an AssertionError if it prints something else than it shows, or draws what is not there."""
    ran = run(page)
    for name in ran.figures:
        assert (page.parent / "images" / name).exists(), f"{page.name} shows {name}: put it there with --write"
    for block, printed in ran.shown.items():
        assert block.mark != "output" or alike(printed, block.text, says(page, "rough")), (
            f"{page.name}, line {block.line}: the page shows\n{block.text}\nbut its code printed\n{printed}"
        )


def write(page: Path) -> None:
    """Run a page, put what it printed into its blocks of output, and its figures into its folder of images."""
    lines, ran = page.read_text().splitlines(keepends=True), run(page)
    for name, figure in ran.figures.items():
        (page.parent / "images").mkdir(exist_ok=True)
        (page.parent / "images" / name).write_bytes(figure)
    for block, printed in reversed(ran.shown.items()):
        lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [printed.rstrip() + "\n"]
    page.write_text("".join(lines))


def alike(printed: str, shown: str, rough: bool = False) -> bool:
    """The same words, and numbers that differ by no more than other processors and threads make them differ."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(_close(a, b, rough) for a, b in pairs)


def _close(printed: str, shown: str, rough: bool) -> bool:
    relative, absolute = (0.05, 0.011)
    if rough:  # a count, or per cent, of some hundred is more often off by a few than a mean is
        relative, absolute = (0.1, 0.05 if "." in shown else 5)
    return math.isclose(_number(printed), _number(shown), rel_tol=relative, abs_tol=absolute)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


if __name__ == "__main__":
    writing = "--write" in sys.argv
    for name in sys.argv[1:]:
        if name != "--write":
            (write if writing else check)(Path(name).resolve())
