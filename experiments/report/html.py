"""Pieces of the report: those of the demo, and tables with the paper's numbers beside ours."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from propagauss.demo.report.html import bullets, figure, page, paragraph

__all__ = ["Cell", "Line", "bullets", "figure", "page", "paragraph", "table"]


@dataclass(frozen=True)
class Cell:
    """Text of a cell; `published` is the paper's number, shown small beside it."""

    text: str
    published: str = ""
    bold: bool = False
    number: bool = True


@dataclass(frozen=True)
class Line:
    """A row of a table; `ours` tints it, `start` draws a line above it."""

    cells: Sequence[Cell | str]
    ours: bool = False
    start: bool = False


def table(head: Sequence[str], lines: Iterable[Line], caption: str = "") -> str:
    """The first column holds names, the others numbers."""
    titles = "".join(f'<th class="{_kind(i)}">{html.escape(t)}</th>' for i, t in enumerate(head))
    rows = "".join(_line(line) for line in lines)
    inner = f"<thead><tr>{titles}</tr></thead><tbody>{rows}</tbody>"
    below = paragraph(caption, soft=True) if caption else ""
    return f'<div class="scroll"><table class="plain">{inner}</table></div>{below}'


def _line(line: Line) -> str:
    names = " ".join(name for name, on in (("ours", line.ours), ("start", line.start)) if on)
    cells = (_cell(c if isinstance(c, Cell) else Cell(c, number=i > 0)) for i, c in enumerate(line.cells))
    return f'<tr class="{names}">{"".join(cells)}</tr>'


def _cell(cell: Cell) -> str:
    text = html.escape(cell.text)
    text = f"<strong>{text}</strong>" if cell.bold else text
    beside = f' <span class="published">{html.escape(cell.published)}</span>' if cell.published else ""
    return f'<td class="{"number" if cell.number else "name"}">{text}{beside}</td>'


def _kind(column: int) -> str:
    return "number" if column else "name"
