"""The report: one HTML page made from all that is stored."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from experiments.frame.experiment import Mode, Section
from experiments.frame.names import NAMES, experiment
from experiments.frame.store import Store, versions
from experiments.report import html
from experiments.report.opening import opening
from propagauss.demo.report.files import write

INTRODUCTION = (
    "Most sections are experiments of the paper “Streamlining Prediction in Bayesian Deep Learning”; calibration, nine "
    "uses, VaLLA's protocol and selective prediction go beyond it. Numbers are from the runs stored beside this file; "
    "the paper's own stand in grey behind them, where it has one for the same cell. Scales are fitted on validation "
    "data only."
)


def section(name: str, results: Path, mode: Mode) -> Section | None:
    """What the stored records of an experiment show; None if there are none."""
    records = Store(results, name, mode).records()
    if not records:
        return None
    return experiment(name).section({key: record["results"] for key, record in records.items()})


def report(results: Path, mode: Mode, names: Iterable[str] = tuple(NAMES)) -> Path:
    """Write `report.html` (or `report-quick.html`) in the results folder, from all that is stored there."""
    parts, contents = [], []
    for name in names:
        found = section(name, results, mode)
        if found is None:
            continue
        one = experiment(name)
        seconds = sum(r.get("seconds", 0.0) for r in Store(results, name, mode).records().values())
        contents.append(f'<li><a href="#{name}">{escape(one.title)}</a></li>')
        parts.append(
            f'<h2 id="{name}">{escape(one.title)}</h2>'
            + html.paragraph(f"{one.source}. python -m experiments {name}; {seconds / 60:.1f} minutes.", soft=True)
            + html.bullets(found.readings)
            + found.body
        )
    packages = ", ".join(f"{package} {number}" for package, number in versions().items())
    body = (
        "<h1>The paper's experiments, and what goes beyond them</h1>"
        + opening(results, mode)
        + html.paragraph(INTRODUCTION)
        + (html.paragraph("Quick run: small subsets; the numbers mean little.") if mode == "quick" else "")
        + f"<nav><h2>Contents</h2><ul>{''.join(contents)}</ul></nav>{''.join(parts)}"
        + html.paragraph(f"Report made with {packages}.", soft=True)
    )
    path = results / ("report.html" if mode == "full" else "report-quick.html")
    return write(path, html.page("propagauss: the paper's experiments", body))
