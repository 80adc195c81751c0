"""The section about VaLLA's protocol: tables with published numbers beside ours, and what they show."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.frame.experiment import Record, Section
from experiments.published import valla as published
from experiments.report import html
from experiments.valla.readings import readings
from experiments.valla.summary import METRICS, Summary, cost_of, summaries
from experiments.valla.ways import BATCH, MAIN, OWN_SCALE, PUBLISHED, ROTATED, Way, title
from propagauss.demo.report import plots

TITLES = {"mnist": "MNIST (outliers Fashion-MNIST)", "fashion_mnist": "Fashion-MNIST (outliers MNIST)"}
HEAD = ["", *METRICS.values(), "NLL - temperature scaling", "cost"]
CAPTION = (
    "Means over {seeds} seeds ± their standard deviation; the difference in NLL is paired over test images, ± its mean "
    "standard error. OOD is the AUROC against the other set, by the entropy of the prediction (as published), the mean "
    "variance of the logits, and the mutual information. Cost: time of a prediction, link included, over that of the "
    "plain forward pass with its softmax, batches of {batch}, interleaved in one run on one thread. Grey: published."
)


def section(records: dict[str, Record]) -> Section:
    found = summaries(records)
    if not found:
        return Section("")
    cost, lines, body = records.get("cost"), readings(found, records), ""
    for name, summary in found.items():
        about = CAPTION.format(seeds=summary.seeds, batch=BATCH)
        body += f"<h3>{TITLES[name]}</h3>{_table(name, summary, MAIN, cost, about)}"
        scales = "The paper's scale, and a temperature at the posterior's own scale (1)."
        body += _table(name, summary, OWN_SCALE, cost, scales)
        rest = [way for way in summary.ways if way not in MAIN and way not in OWN_SCALE]
        body += _table(name, summary, rest, cost, "The other priors, links and calibrations.")
    curves = _curves(records)
    if curves:
        about = f"Rotated MNIST, {curves['points']:,} test images, mean over seeds; calibrated on upright images."
        body += html.figure(_plot(curves), about)
    return Section(body, lines, headline(found, cost, lines))


def _table(name: str, summary: Summary, ways: Sequence[Way], cost: Record | None, caption: str) -> str:
    lines = []
    for way in (w for w in ways if w in summary.ways):
        theirs = published.NUMBERS[name].get(PUBLISHED.get(way, ""), {})
        cells = [html.Cell(title(way).replace("`", ""), number=False)]
        cells += [html.Cell(summary.text(way, m), f"{theirs[m]:.4g}" if m in theirs else "") for m in METRICS]
        cells += [html.Cell(summary.difference(way)), html.Cell(cost_of(cost, way, BATCH))]
        lines.append(html.Line(cells, ours=way.calibration == "calibrate"))
    lines += [] if ways is not MAIN else [_published_line(name)]
    return html.table(HEAD, lines, caption)


def _published_line(name: str) -> html.Line:
    theirs = published.NUMBERS[name]["VaLLA"]
    cells = [html.Cell("VaLLA, published", number=False)]
    cells += [html.Cell(f"{theirs[m]:.4g}" if m in theirs else "") for m in METRICS]
    return html.Line([*cells, html.Cell(""), html.Cell("")], start=True)


def headline(found: Mapping[str, Summary], cost: Record | None, lines: Sequence[str]) -> str:
    """Markdown: the main tables, with published rows below ours, and the readings."""
    seeds = min(summary.seeds for summary in found.values())
    parts = [CAPTION.format(seeds=seeds, batch=BATCH).removesuffix(" Grey: published.")]
    for name, summary in found.items():
        rows = [f"| {TITLES[name]} {' | '.join(HEAD)} |", f"|---|{'--:|' * (len(HEAD) - 1)}"]
        for way in (w for w in MAIN if w in summary.ways):
            cells = [title(way), *(summary.text(way, m) for m in METRICS)]
            rows.append(f"| {' | '.join([*cells, summary.difference(way), cost_of(cost, way, BATCH)])} |")
        for method, theirs in published.NUMBERS[name].items():
            cells = [f"*published: {method}*", *(f"{theirs[m]:.4g}" if m in theirs else "" for m in METRICS)]
            rows.append(f"| {' | '.join([*cells, '', ''])} |")
        parts.append("\n".join(rows))
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)])


# -- rotations


def _curves(records: Mapping[str, Record]) -> dict[str, Any]:
    """Title -> metric -> mean over seeds at each angle; and the angles."""
    mine = [r for r in records.values() if r.get("curves")]
    if not mine:
        return {}
    found: dict[str, Any] = {"angles": mine[0]["angles"], "points": mine[0]["turned"], "curves": {}}
    for index, way in enumerate(ROTATED):
        curves = [r["curves"][str(index)] for r in mine if str(index) in r["curves"]]
        found["curves"][title(way).replace("`", "")] = {
            metric: [statistics.mean(c[metric] for c in at) for at in zip(*curves, strict=True)]
            for metric in ("nlpd", "ece", "accuracy")
        }
    return found


def _plot(found: Mapping[str, Any]) -> str:
    with plots.drawing(8.6, 3.4) as (figure, svg):
        axes = figure.subplots(1, 2)
        for axis, (metric, label) in zip(axes, (("nlpd", "NLL"), ("ece", "ECE")), strict=True):
            for name, curve in found["curves"].items():
                axis.plot(found["angles"], curve[metric], label=name)
            axis.set(xlabel="angle", ylabel=label)
            axis.grid()
        axes[0].legend(fontsize=6)
        return svg()
