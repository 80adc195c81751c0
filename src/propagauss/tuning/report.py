"""The leaderboard as an HTML page, with the plots of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from propagauss.demo.methods import EXACT, OURS, Result
from propagauss.demo.report import html, plots
from propagauss.demo.report.files import write as write_file
from propagauss.demo.timing import Ratio
from propagauss.tuning.candidates import Candidate
from propagauss.tuning.rows import HEAD, Entry, cells_of

METHODS = {"streamlined": OURS, "linearised": EXACT}  # as the demo calls, and colours, them


def write(entries: Sequence[Entry], why: str, points: int, path: Path) -> Path:
    return write_file(path, page(entries, why, points))


def page(entries: Sequence[Entry], why: str, points: int) -> str:
    body = (
        f"<h1>Ways to predict, compared on {points} validation points</h1>"
        + html.paragraph(why)
        + html.paragraph(
            "Every candidate was calibrated on four fifths of the points and scored on the rest, in turn. ± is one "
            "standard error of the NLPD; cost and memory are ratios to the plain model. ★ is the one taken, which was "
            "then calibrated on all points.",
            soft=True,
        )
        + _table(entries)
        + _figures(entries)
    )
    return html.page("propagauss: tune", body)


def _table(entries: Sequence[Entry]) -> str:
    head = "".join(f'<th class="{_kind(i)}">{escape(title)}</th>' for i, title in enumerate([*HEAD, ""]))
    rows = []
    for row in (entry.row for entry in entries):
        cells = [row.name, *cells_of(row)[1:], "★" if row.winner else row.failure]
        inner = "".join(f'<td class="{_kind(i)}">{escape(cell)}</td>' for i, cell in enumerate(cells))
        rows.append(f'<tr class="{"ours" if row.winner else ""}">{inner}</tr>')
    inner = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="plain">{inner}</table></div>'


def _kind(column: int) -> str:
    return "number" if 0 < column < len(HEAD) else "name"


def _figures(entries: Sequence[Entry]) -> str:
    judged = [e for e in entries if e.verdict is not None]
    plain = [e for e in judged if e.candidate.engine == "plain"]
    winner = next(e for e in judged if e.row.winner)
    shown = [*plain, *([] if winner in plain else [winner])]
    found = ""
    labels = winner.judged.labels
    if labels is not None and all(e.judged.probs is not None for e in shown):
        results = [_result(e) for e in shown]
        found += html.figure(
            plots.reliability(results, labels),
            "Reliability. Calibrated predictions lie on the diagonal, up to chance: the grey bars are two standard "
            "errors for a bin of that size. Below: share of predictions by confidence, on a logarithmic scale.",
        )
        found += html.figure(
            plots.rejection(results, labels),
            "Accuracy on what is left when the predictions of largest entropy are rejected.",
        )
    base = plain[:1] or judged[:1]
    results = [_result(e) for e in (*base, *(e for e in judged if e not in base))]
    return found + html.figure(
        plots.cost(results),
        "NLPD against time. Hollow: probit link. Lower and further left is better; "
        "the grey band is one standard error of the plain model's NLPD to either side.",
    )


def _result(entry: Entry) -> Result:
    """As the demo's plots take it."""
    verdict, row = entry.judged, entry.row
    time = Ratio(row.cost, row.cost, row.cost) if row.cost else None
    metrics = {"nlpd": verdict.nlpd, "ece": verdict.ece or 0.0}
    found = Result(_method(entry.candidate), row.structure, row.link, fitted=True, metrics=metrics, time=time)
    found.losses = verdict.losses
    if verdict.probs is not None:
        found.probs = verdict.probs
    return found


def _method(candidate: Candidate) -> str:
    if candidate.engine == "plain":
        return "temperature scaling" if candidate.calibrated else "MAP"
    return METHODS[candidate.engine]
