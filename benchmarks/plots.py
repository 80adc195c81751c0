"""Figures of the documentation, from a stored report: docs/images/*.svg."""

from __future__ import annotations

from matplotlib.axes import Axes

from benchmarks import growth
from benchmarks.case import PLAIN
from benchmarks.results import ROOT, Report, Row, write
from propagauss.demo.report import plots

IMAGES = ROOT / "docs" / "images"
LABELS = {
    "width": "width of the layers",
    "depth": "layers",
    "classes": "classes",
    "bayesian": "Bayesian layers, of 4",
    "batch": "batch",
}
BAR_COLOURS = {"streamlined": "#2f7fd1", "our": "#e08e0b", "laplace": "#1fa87f", "suq": "#c86da2"}
GREY = "#8a8f98"


def draw(report: Report) -> list[str]:
    """Write the figures that the report has data for; their names."""
    drawn = {"growth.svg": _growth(report), "methods.svg": _methods(report)}
    for name, text in drawn.items():
        if text:
            write(IMAGES / name, text)
    return [name for name, text in drawn.items() if text]


# -- growth


def _growth(report: Report) -> str:
    """Ratio to the plain forward as one property varies; the band holds 10 to 90 % of the rounds."""
    if not any(case.startswith("growth/") for case in report.titles):
        return ""
    with plots.drawing(9.5, 2.6) as (figure, text):
        panels = figure.subplots(1, len(LABELS), sharey=True)
        for axes, name in zip(panels, LABELS, strict=True):
            _panel(axes, report, name)
        panels[0].set_ylabel("time over plain forward")
        rows = [r for r in report.rows if r.case.startswith("growth/") and r.method == growth.OURS]
        ratios = [r.timing.ratio for r in rows if r.timing]
        panels[0].set_ylim(0, 1.5 * max(ratios, default=1))  # a band that is wider says only that the machine was busy
        panels[-1].legend(loc="upper left")
        return text()


def _panel(axes: Axes, report: Report, name: str) -> None:
    found = [(value, report.find(f"growth/{name}/{value}", growth.OURS)) for value in growth.VARIED[name]]
    timed = [(value, row.timing) for value, row in found if row and row.timing]
    counts = [(value, report.find(f"growth/{name}/{value}", growth.COUNT)) for value, _ in timed]
    values = [value for value, _ in timed]
    colour = BAR_COLOURS["streamlined"]
    axes.fill_between(values, [t.low for _, t in timed], [t.high for _, t in timed], color=colour, alpha=0.18, lw=0)
    axes.plot(values, [t.ratio for _, t in timed], "o-", color=colour, ms=3, lw=1.3, label="measured")
    axes.plot(
        [value for value, row in counts if row],
        [row.computed for _, row in counts if row and row.computed],
        "--",
        color=GREY,
        lw=1,
        label="multiplications",
    )
    if name != "bayesian":
        axes.set_xscale("log", base=2 if name != "classes" else 10)
    axes.set_xticks(values, [f"{value:,}" for value in values], rotation=45 if len(values) > 4 else 0)
    axes.minorticks_off()
    axes.set_xlabel(LABELS[name])
    axes.grid(axis="y")


# -- methods


def _methods(report: Report) -> str:
    """Every way to predict with a diagonal posterior on the MLP, by batch size, on a logarithmic scale."""
    cases = [case for case in report.titles if case.startswith("mlp/diagonal/")]
    if not cases:
        return ""
    names = dict.fromkeys(r.method for case in cases for r in report.of(case) if r.timing and r.method != PLAIN)
    with plots.drawing(9.5, 0.5 + 0.24 * len(names)) as (figure, text):
        panels = figure.subplots(1, len(cases), sharex=True, sharey=True, squeeze=False)[0]
        for axes, case in zip(panels, cases, strict=True):
            _bars(axes, {r.method: r for r in report.of(case)}, list(names))
            axes.set_title(f"batch {case.rsplit('/', 1)[1]}")
            axes.set_xlabel("time over plain forward")
        panels[0].set_yticks(range(len(names)), list(names))
        panels[0].invert_yaxis()
        return text()


def _bars(axes: Axes, rows: dict[str, Row], names: list[str]) -> None:
    for at, name in enumerate(names):
        timing = rows[name].timing if name in rows else None
        if timing:
            colour = next((c for start, c in BAR_COLOURS.items() if name.startswith(start)), GREY)
            axes.barh(at, timing.ratio, color=colour, height=0.7)
            axes.plot([timing.low, timing.high], [at, at], color=plots._INK, lw=0.8)
    axes.set_xscale("log")
    axes.set_xlim(left=1)
    axes.grid(axis="x")
