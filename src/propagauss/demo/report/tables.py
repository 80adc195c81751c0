"""Tables of results, for the terminal and for the report."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from propagauss.demo.methods import OURS, Result, best, is_tied

LEGEND = (
    "* least NLPD; ~ not told apart from it on these test points (less than two standard errors of the difference).\n"
    "scale 1 is the posterior as it was fitted; every other scale (and noise) was fitted on the validation part only."
)


@dataclass(frozen=True)
class Column:
    """A heading, the text of a cell, and whether it is a number."""

    title: str
    cell: Callable[[Result], str]
    number: bool = True


def _scale(result: Result) -> str:
    if result.method == "temperature scaling":
        return f"T = {result.scale:.3g}"
    return "" if result.scale is None else "1" if not result.fitted else f"{result.scale:.2g}"


_WHO = (
    Column("method", lambda r: r.method, number=False),
    Column("posterior", lambda r: r.structure, number=False),
)
CLASSIFICATION = (
    *_WHO,
    Column("link", lambda r: r.link.replace("_", "-"), number=False),
    Column("scale", _scale),
    Column("accuracy %", lambda r: f"{100 * r.metrics['accuracy']:.1f}"),
    Column("ECE %", lambda r: f"{100 * r.metrics['ece']:.1f}"),
    Column("time", lambda r: "" if r.time is None else f"{_three(r.time.median)}x"),
    Column("NLPD", lambda r: f"{r.nlpd:.3f}"),
)
REGRESSION = (
    *_WHO,
    Column("scale", _scale),
    Column("noise", lambda r: f"{r.noise:.2f}"),
    Column("RMSE", lambda r: f"{r.metrics['rmse']:.3f}"),
    Column("NLPD", lambda r: f"{r.nlpd:.3f}"),
)


def describe(sizes: Sequence[int], parameters: int, points: dict[str, int]) -> str:
    """One line about a network and its data."""
    shape = "-".join(map(str, sizes))
    counts = ", ".join(f"{n} {part}" for part, n in points.items())
    return f"ReLU network {shape} ({parameters} parameters), points: {counts}"


def marks(results: Sequence[Result]) -> list[str]:
    """`*` for the least NLPD, `~` for what cannot be told apart from it."""
    winner = best(results)
    return ["*" if r is winner else "~" if is_tied(r, winner) else " " for r in results]


def text(results: Sequence[Result], columns: Sequence[Column]) -> str:
    """Aligned plain text, the mark of the NLPD at the end of the line."""
    rows = [[c.title for c in columns], *[[c.cell(r) for c in columns] for r in results]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    found = [" ", *marks(results)]
    lines = []
    for row, mark in zip(rows, found, strict=True):
        cells = [v.rjust(w) if c.number else v.ljust(w) for v, w, c in zip(row, widths, columns, strict=True)]
        lines.append(f"  {'  '.join(cells)} {mark}".rstrip())
    lines.insert(1, "  " + "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def to_html(results: Sequence[Result], columns: Sequence[Column]) -> str:
    """An HTML table with a line between methods."""
    head = "".join(f'<th class="{_kind(c)}">{html.escape(c.title)}</th>' for c in columns)
    body, before = [], None
    for result, mark in zip(results, marks(results), strict=True):
        names = ["ours"] if result.method == OURS else []
        names += {"*": ["best"], "~": ["tied"]}.get(mark, [])
        names += ["start"] if result.method != before else []
        before = result.method
        cells = "".join(f'<td class="{_kind(c)}">{html.escape(c.cell(result))}</td>' for c in columns)
        body.append(f'<tr class="{" ".join(names)}">{cells}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _kind(column: Column) -> str:
    return "number" if column.number else "name"


def _three(value: float) -> str:
    """Three significant digits, but no exponent."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
