"""The section of the report about the number of samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.cost.mc_curves import NLPD_STDDEV, reaches, saturation
from experiments.frame.experiment import Record, Section
from experiments.published import mc_samples as published
from experiments.report import html
from propagauss.demo.report import plots

FAMILIES = {"uci": "UCI regression, first fold", "images": "MLPs on images", "vit": "ViT, random attention"}
NAMES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
PUBLISHED = {
    ("uci", "ccpp"): published.CCPP,
    ("images", "fashion_mnist"): published.FMNIST,
    ("vit", "cifar10"): published.VIT_CIFAR10,
}
USED = {"uci": 1000, "images": 1000, "vit": 50}  # draws in the paper's tables
TOLERANCE = 0.01  # in NLPD
SAME = 1e-4  # in NLPD: the same network
COLUMNS = 4


@dataclass(frozen=True)
class Curve:
    """One posterior of one record."""

    record: Record
    kind: str
    linearised: Mapping[str, float] | None = None  # as `ours`, and the NLPD of ours beside it; if they were measured

    @property
    def family(self) -> str:
        return self.record["family"]

    @property
    def points(self) -> Sequence[dict[str, Any]]:
        return self.record["curves"][self.kind]["points"]

    @property
    def ours(self) -> Mapping[str, float]:
        return self.record["curves"][self.kind]["ours"]

    @property
    def cost(self) -> float:
        """Of a draw, in streamlined passes."""
        return self.record["curves"][self.kind]["cost"]["median"]

    @property
    def name(self) -> str:
        name = self.record["name"]
        return f"{NAMES.get(name, name)}, {self.kind}"

    @property
    def theirs(self) -> Mapping[str, published.Curve]:
        return PUBLISHED.get((self.family, self.record["name"]), {}).get(self.kind, {})

    @property
    def trained_again(self) -> bool:
        """Whether linearised is of a network that came out otherwise than that of the curve."""
        return self.linearised is not None and abs(self.linearised["ours"] - self.ours["nlpd"]) >= SAME

    @property
    def saturates(self) -> int:
        return saturation(self.points, TOLERANCE)


def section(records: Mapping[str, Record]) -> Section:
    exact = {
        (r["family"], r["name"], kind): numbers
        for r in records.values()
        for kind, numbers in r.get("linearised", {}).items()
    }
    curves = [
        Curve(r, kind, exact.get((r["family"], r["name"], kind)))
        for r in records.values()
        for kind in r.get("curves", {})
    ]
    body = [html.paragraph(_NOTE)]
    for family, title in FAMILIES.items():
        mine = sorted((c for c in curves if c.family == family), key=lambda c: (c.kind, c.record["name"]))
        if mine:
            body.append(f"<h3>{title}</h3>" + html.figure(_plot(mine), _CAPTION) + _table(mine))
    return Section("".join(body), readings(curves))


_NOTE = (
    "Sampling from the posterior as it is, with more and more draws, and ours with its scale fitted. Draws are taken "
    "in one stream; a number of draws is judged by all the separate predictions that the stream holds of it, so that "
    "the largest has one and no error bar. The stream ends at 50,000 (UCI), 25,000 (Fashion-MNIST) and 100 draws (ViT) "
    "as in the paper, but at 10,000 for itt and pt and 5,000 for cac and MNIST, to save time. Test points: at most 500 "
    "(UCI, ViT) and 1,000 (images), chosen at random."
)
_CAPTION = (
    "NLPD against the number of draws: mean and standard deviation of separate predictions. Line: ours, one pass; "
    "dashed: linearised, its scale fitted, too (where it is of the same network). Dotted: the number of draws in the "
    "paper's tables."
)


def _plot(curves: Sequence[Curve]) -> str:
    columns = min(COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    with plots.drawing(2.5 * columns, 1.9 * rows) as (figure, svg):
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(curves) :]:
            axis.set_visible(False)
        for axis, c in zip(axes.flat, curves, strict=False):
            x, y = [p["samples"] for p in c.points], [p["nlpd"] for p in c.points]
            error = [p[NLPD_STDDEV] or 0.0 for p in c.points]
            style = {"color": plots.COLOURS["sampling"], "markersize": 3, "linewidth": 1, "capsize": 2}
            axis.errorbar(x, y, error, fmt="o-", **style)
            axis.axhline(c.ours["nlpd"], color=plots.COLOURS[plots.OURS], linewidth=1.6)
            if c.linearised is not None and not c.trained_again:
                axis.axhline(c.linearised["nlpd"], color=plots.COLOURS[plots.EXACT], linewidth=1.2, linestyle="--")
            axis.axvline(USED[c.family], color=plots._INK, linewidth=0.8, alpha=0.5, linestyle=":")
            axis.set(title=c.name, **({} if c.family == "vit" else {"xscale": "log"}))
        figure.supxlabel("draws", fontsize=9, color=plots._INK)
        return svg()


def _table(curves: Sequence[Curve]) -> str:
    counts = sorted({p["samples"] for c in curves for p in c.points})
    lines = []
    for c in curves:
        at = {p["samples"]: p for p in c.points}
        nlpd = [_cell(at, n, "nlpd", c.theirs) for n in counts]
        needed = reaches(c.points, c.ours["nlpd"])
        cost = c.saturates * c.cost
        lines.append(
            html.Line(
                [
                    f"{c.name}: NLPD",
                    *nlpd,
                    f"{c.ours['nlpd']:.3f}",
                    _exact(c, "nlpd"),
                    f"{c.saturates:,}",
                    _times(cost),
                    _count(needed),
                ],
                start=True,
            )
        )
        second = [_cell(at, n, "second", c.theirs, c.record["second"]) for n in counts]
        label = "RMSE" if c.record["second"] == "rmse" else "ACC"
        lines.append(html.Line([label, *second, f"{c.ours['second']:.3f}", _exact(c, "second"), "", "", ""]))
    head = ["", *(f"{n:,}" for n in counts), "ours", "linearised", "saturates", "cost there", "reaches ours"]
    caption = (
        f"Saturates: from there on within {TOLERANCE} of the NLPD with most draws. Cost there: time of so many draws, "
        "in passes of the streamlined network over the same inputs (drawing the weights included). Reaches ours: the "
        "least number of draws with an NLPD as low as that of ours. Linearised: with its scale fitted; in brackets, "
        "ours on the same network, where it had to be trained again and came out otherwise. Grey: the paper's figure, "
        "for another network."
    )
    return html.table(head, lines, caption)


def _exact(c: Curve, metric: str) -> str:
    if c.linearised is None:
        return "not run"
    beside = f" ({c.linearised['ours']:.3f})" if c.trained_again and metric == "nlpd" else ""
    return f"{c.linearised[metric]:.3f}{beside}"


def _cell(at: Mapping[int, Any], n: int, metric: str, theirs: Mapping[str, Any], their_name: str = "nlpd") -> html.Cell:
    if n not in at:
        return html.Cell("")
    published_here = theirs.get(their_name, {}).get(n)
    return html.Cell(f"{at[n][metric]:.3f}", "" if published_here is None else f"{published_here:.3f}")


def _times(cost: float) -> str:
    return f"{cost:.1f}×" if cost < 10 else f"{cost:,.0f}×"


def _count(needed: int | None) -> str:
    return "never" if needed is None else f"{needed:,}"


# -- readings


def readings(curves: Sequence[Curve]) -> list[str]:
    found = []
    for family, title in FAMILIES.items():
        for kind in ("LA", "MFVI"):
            mine = [c for c in curves if (c.family, c.kind) == (family, kind)]
            if mine:
                found.append(f"{title}, {kind}: {_saturation(mine, family, kind)} {_never(mine)}{_linearised(mine)}")
    return found


def _saturation(curves: Sequence[Curve], family: str, kind: str) -> str:
    used, within = USED[family], f"within {TOLERANCE}"
    claim = published.SATURATES.get(family if family == "vit" else f"{_WORD[family]} {kind}".strip())
    claim = published.SATURATES["regression"] if claim is None else claim
    good = [c for c in curves if c.saturates <= claim]
    late = [f"{c.record['name']} ({c.saturates:,})" for c in curves if c.saturates > claim]
    text = f"sampling is {within} of its end with {claim:,} draws, as the paper says, on {len(good)} of {len(curves)}"
    text += f"; later: {', '.join(late)}" if late else ""
    stddevs = [p[NLPD_STDDEV] for c in curves for p in c.points if p["samples"] == used and p[NLPD_STDDEV]]
    if stddevs:
        text += f"; with the paper's {used:,} draws two predictions differ by a standard deviation of "
        text += f"{statistics.median(stddevs):.4f} in NLPD" + (" (median)" if len(stddevs) > 1 else "")
    costs = [used * c.cost for c in curves]
    text += f" and cost {_times(statistics.median(costs))} one streamlined pass"
    return text + "."


def _linearised(curves: Sequence[Curve]) -> str:
    """Against ours on the same network, both with fitted scales."""
    gaps = [c.linearised["nlpd"] - c.linearised["ours"] for c in curves if c.linearised is not None]
    if not gaps:
        return " Linearised: not run."
    below = sum(gap < -TOLERANCE for gap in gaps)
    above = sum(gap > TOLERANCE for gap in gaps)
    return (
        f" Linearised with a fitted scale is more than {TOLERANCE} below ours on {below} of {len(gaps)} and above it "
        f"on {above} (median {statistics.median(gaps):+.3f})."
    )


_WORD = {"uci": "regression", "images": "classification", "vit": "vit"}


def _never(curves: Sequence[Curve]) -> str:
    """Where more draws do not help, and where they do."""
    never = [c for c in curves if reaches(c.points, c.ours["nlpd"]) is None]
    gaps = [c.points[-1]["nlpd"] - c.ours["nlpd"] for c in curves]
    better = [c for c, gap in zip(curves, gaps, strict=True) if gap < -TOLERANCE]
    text = f"No number of draws from the posterior as it is reaches the NLPD of ours on {len(never)} of {len(curves)}"
    if len(curves) == 1:
        text = (
            "No number of draws from the posterior as it is reaches the NLPD of ours"
            if never
            else "Sampling reaches the NLPD of ours"
        )
    text += f" (at the end: {statistics.median(gaps):+.3f}{', median' if len(gaps) > 1 else ''})"
    if better:
        text += f"; sampling ends more than {TOLERANCE} below ours on {', '.join(c.record['name'] for c in better)}"
    return text + "."
