"""The section of the report about the UCI sets: the paper's two tables, and what lies behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.frame.experiment import Record, Section
from experiments.published import uci as published
from experiments.report import html
from experiments.uci import calibrated
from experiments.uci import layers as uci_layers
from experiments.uci.data import CHOICES, SETS
from experiments.uci.methods import STDDEV
from experiments.uci.posteriors import PROTOCOL
from experiments.uci.readings import readings
from experiments.uci.summary import FITTED, PAPER, Summary, bold_counts, lines, mean_ranks, summaries

NAMES = [m for methods in PAPER.values() for m in methods]
BOLD = (
    "Mean ± standard deviation over folds; the paper's in grey. Bold: the least mean among the methods of a posterior, "
    "or not told apart from it by a paired t-test (5%) over the test points of all folds. Ours has its scale fitted on "
    "the validation part, the others do not, as in the paper."
)
Published = Mapping[str, Mapping[str, published.Value]]


def section(records: Mapping[str, Record]) -> Section:
    sets, both = summaries(records), calibrated.summaries(records)
    body = (
        html.paragraph(CHOICES)
        + html.paragraph(PROTOCOL)
        + "<h3>NLPD</h3>"
        + _paper_table(sets, "nlpd", published.NLPD)
        + "<h3>RMSE</h3>"
        + _paper_table(sets, "rmse", published.RMSE)
        + "<h3>NLPD of all methods</h3>"
        + _all_methods(sets)
        + html.paragraph("GLM is what `pg.linearise` computes.")
        + "<h3>Scale and noise together</h3>"
        + calibrated.table(both, sets)
        + "<h3>Sizes, and what was fitted</h3>"
        + _behind(sets)
    )
    layers = {n: [r for r in records.values() if r["set"] == n and "fold" not in r] for n in SETS}
    layers = {n: found for n, found in layers.items() if found}
    if layers:
        body += "<h3>What one pass leaves out and adds</h3>" + _layers(layers)
    return Section(body, [*readings(sets, layers), *calibrated.readings(both)], _headlines(sets, both))


def _headlines(sets: Sequence[Summary], both: Sequence[Summary]) -> str:
    return "\n\n".join(text for text in (headline(sets), calibrated.headline(both)) if text)


def _paper_table(sets: Sequence[Summary], metric: str, paper: Published) -> str:
    lines = []
    for s in sets:
        marks = {m: b for methods in PAPER.values() for m, b in s.bold(metric, methods).items()}
        size = f"({SETS[s.name].n}, {SETS[s.name].d})"
        cells = [html.Cell(s.text(metric, m), _value(paper, s.name, m), marks[m]) for m in NAMES]
        lines.append(html.Line([s.name, size, *cells]))
    counts = bold_counts(sets, metric, PAPER)
    last = [html.Cell(f"{counts[m]}/{len(sets)}", paper_count(paper, m)) for m in NAMES]
    lines.append(html.Line(["bold count", "", *last], start=True))
    return html.table(["set", "(n, d)", *NAMES], lines, BOLD)


def _value(paper: Published, name: str, method: str) -> str:
    mean, stddev, _ = paper[name][method]
    return f"{mean:.3f} ± {stddev:.3f}"


def paper_count(paper: Published, method: str) -> str:
    return f"{sum(row[method][2] for row in paper.values())}/{len(paper)}"


def _all_methods(sets: Sequence[Summary]) -> str:
    """Methods in rows, sets in columns; bold as in the contest in which each has one number fitted."""
    caption = (
        "Means over folds. Bold, bold count and mean rank are among those methods of a posterior that have one number "
        "fitted on the validation part: the scale, or the noise of MAP (counted with LA). “One Gaussian” replaces the "
        "mixture over draws by its mean and variance. “Variances only” streamlines with covariance='diagonal'."
    )
    rows = lines(sets, FITTED, lambda method: " ours" in method)
    return html.table(["method", *(s.name for s in sets), "bold", "rank"], rows, caption)


def _behind(sets: Sequence[Summary]) -> str:
    lines = []
    for s in sets:
        info, parts = SETS[s.name], s.folds[0]["parts"]
        cells = ["-".join(map(str, info.sizes)), str(info.parameters), "/".join(str(v) for v in parts.values())]
        for kind in ("LA", "MFVI"):
            ours = f"{kind} ours"
            stddevs = [s.median(STDDEV, f"{kind} {m}") for m in ("sampling", "GLM", "ours")]
            cells += [
                f"{s.median('noise', ours):.2f}",
                " / ".join(f"{v:.2f}" for v in stddevs),
                f"{s.median('scale', ours):.2g}",
                str(s.at_bound(ours)),
            ]
        lines.append(html.Line([s.name, *cells]))
    own = ["noise", "sd", "scale", "at bound"]
    head = ["set", "network", "weights", "train/val/test", *(f"{kind} {c}" for kind in ("LA", "MFVI") for c in own)]
    caption = (
        "Medians over folds. Sd: median over test points of the standard deviation of the latent as it is, for "
        "sampling / GLM / ours. Scale: that of ours, fitted; at bound: folds in which it ended at the end of its range."
    )
    return html.table(head, lines, caption)


def _layers(layers: Mapping[str, Sequence[Record]]) -> str:
    found = {n: uci_layers.mean(records) for n, records in layers.items()}
    lines = []
    for method in next(iter(found.values())):
        mine, ours = [f[method] for f in found.values()], "ours" in method
        lines.append(html.Line([f"{method}: NLPD", *(f"{m['nlpd']:.3f}" for m in mine)], ours, True))
        lines.append(html.Line(["sd", *(f"{m[STDDEV]:.2f}" for m in mine)], ours))
        lines.append(html.Line(["scale", *(f"{m['scale']:.2g}" for m in mine)], ours))
    caption = (
        "LA, first fold (servo: all), each with its scale fitted on the validation part. Layer by layer: GLM with the "
        "posterior cut into one block per layer, which is all that one pass uses; ours adds terms of second order (the "
        "variance of a layer's input times that of its weights). Moment matching: ours with activation='moments'."
    )
    return html.table(["", *found], lines, caption)


def headline(sets: Sequence[Summary]) -> str:
    """Bold counts and ranks as a Markdown table."""
    nlpd, rmse = (bold_counts(sets, metric, PAPER) for metric in ("nlpd", "rmse"))
    ranks, n = mean_ranks(sets, PAPER), len(sets)
    lines = [
        f"| UCI regression, {n} sets | NLPD best or tied (paper) | RMSE best or tied (paper) | mean NLPD rank |",
        "|---|---|---|---|",
    ]
    for kind, methods in PAPER.items():
        for m in methods:
            name = m.replace(f"{kind} ", f"{kind}, ")
            counts = (
                f"{found[m]}/{n} ({paper_count(paper, m)})"
                for found, paper in ((nlpd, published.NLPD), (rmse, published.RMSE))
            )
            lines.append(f"| {name} | {' | '.join(counts)} | {ranks[m]:.1f} of {len(methods)} |")
    return "\n".join(lines)
