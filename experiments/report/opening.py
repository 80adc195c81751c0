"""What the report opens with: up to three pictures with a sentence each, made from whatever is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from experiments.frame.experiment import Mode, Record
from experiments.frame.store import Store
from experiments.report import html
from experiments.tasks.calibration import TITLES
from experiments.uci.summary import summaries
from propagauss.demo.report import plots
from propagauss.predictive.calibration import TOLERANCE

WIDTH, HEIGHT, MOST = 4.4, 3.0, 3
Records = Mapping[str, Record]  # by "EXPERIMENT/UNIT"
Picture = tuple[str, str]  # SVG, sentence
GREY, ORANGE, GREEN, BLUE, PINK = "#8a8f98", "#e08e0b", "#1fa87f", "#2f7fd1", "#c86da2"  # those of the other figures


def opening(results: Path, mode: Mode) -> str:
    """HTML of the first pictures that have their records; nothing if none has."""
    shown = []
    for names, picture in PICTURES.items():
        records = {
            f"{name}/{key}": record["results"]
            for name in names
            for key, record in Store(results, name, mode).records().items()
        }
        found = picture(records) if records else None
        if found is not None:
            shown.append(html.figure(*found))
    return f'<div class="opening">{"".join(shown[:MOST])}</div>' if shown else ""


# -- what a prediction costs

COSTS = {"LA sampling": ("sampling", ORANGE), "LA GLM": ("Jacobian (GLM)", GREY)}
COSTS |= {"linearised": ("linearised", GREEN), "ours": ("streamlined", BLUE)}
NETWORKS = {"mlp": "MLP", "vit": "ViT-base, two random blocks", "vit-head": "ViT-base, random head"}


def cost(records: Records) -> Picture | None:
    """Time of a prediction in plain forward passes, by method."""
    known = {title: records.get(f"runtime/{key}") for key, title in NETWORKS.items()}
    times = {title: record["times"] for title, record in known.items() if record is not None}
    if not times:
        return None
    methods = [m for m in COSTS if any(m in t for t in times.values())]
    values = {COSTS[m]: [t[m]["median"] if m in t else None for t in times.values()] for m in methods}
    told = "; ".join(
        f"{name} {_short(t['ours']['median'])} streamlined, {_short(t['LA sampling']['median'])} sampled"
        for name, t in times.items()
    )
    sentence = f"A prediction with uncertainty, in plain forward passes (one data point at a time): {told}."
    return _bars(list(times), values, "time / plain forward pass", logarithmic=True), sentence


# -- how good it is, against many draws

FAMILIES = {"uci": ("o", "UCI regression"), "mnist": ("s", "MLP on images"), "vit": ("^", "ViT")}
KINDS = {"LA": ORANGE, "MFVI": BLUE}


@dataclass(frozen=True)
class Posterior:
    """NLPDs of one posterior: streamlined with a fitted scale, sampling as it is, and sampling with a fitted scale."""

    family: str
    kind: str
    ours: float
    sampled: float
    fitted: float


def quality(records: Records) -> Picture | None:
    """NLPD of sampling, with and without a fitted scale, against that of one streamlined pass."""
    found = [*_regression(records), *_classes(records)]
    if not found:
        return None
    with plots.drawing(WIDTH, HEIGHT) as (figure, svg):
        axis = figure.subplots()
        for p in found:
            marker, colour = FAMILIES[p.family][0], KINDS[p.kind]
            axis.plot([p.ours], [p.sampled], marker, color=colour, markersize=5, alpha=0.5, fillstyle="none")
            axis.plot([p.ours], [p.fitted], marker, color=colour, markersize=5, alpha=0.8)
        ends = [min(p.ours for p in found), max(p.ours for p in found)]
        axis.plot(ends, ends, color=GREY, linewidth=0.8)
        for kind, colour in KINDS.items():
            axis.plot([], [], "o", color=colour, label=f"{kind}, scale fitted")
        for kind, colour in KINDS.items():
            axis.plot([], [], "o", color=colour, fillstyle="none", label=f"{kind} as it is")
        for marker, name in FAMILIES.values():
            axis.plot([], [], marker, color=GREY, label=name)
        axis.set(xlabel="NLPD, streamlined, scale fitted: one pass", ylabel="NLPD, sampling")
        axis.grid()
        figure.legend(loc="outside upper center", ncols=3, fontsize=7)
        drawn = svg()
    by_kind = {kind: [p for p in found if p.kind == kind] for kind in KINDS}
    alone = " and ".join(f"{sum(p.ours < p.sampled for p in f)} of {len(f)} {kind}" for kind, f in by_kind.items())
    both = " and ".join(str(sum(p.ours < p.fitted for p in f)) for f in by_kind.values())
    gaps = " and ".join(f"{abs(median(p.fitted - p.ours for p in f)):.3f}" for f in by_kind.values())
    sentence = (
        f"One streamlined pass with a fitted scale has a lower NLPD (above the line) than 1,000 draws (ViT: 50) from "
        f"{alone} posteriors as they are, and from {both} of them where sampling has a scale fitted on the same data: "
        f"there the median difference is {gaps}."
    )
    return drawn, sentence


def _regression(records: Records) -> Iterator[Posterior]:
    """Means over the folds of each UCI set."""
    for s in summaries({key: record for key, record in records.items() if key.startswith("uci/")}):
        for kind in KINDS:
            ways = (f"{kind} ours", f"{kind} sampling", f"{kind} sampling, scale fitted")
            yield Posterior("uci", kind, *(s.mean("nlpd", way) for way in ways))


def _classes(records: Records) -> Iterator[Posterior]:
    """MLPs with the exact Kronecker form, and ViTs."""
    for key, record in records.items():
        family = key.partition("/")[0]
        if family == "uci" or "prior_precision" not in record:  # others are about training, and about the engines
            continue
        rows = record["rows" if family == "mnist" else "scores"]
        for kind in KINDS:
            mine = [row for row in rows if row["posterior"] == kind and row["form"] in ("", "exact")]
            ours = [r["nlpd"] for r in mine if (r["method"], r["link"], r["fitted"]) == ("ours", "probit", True)]
            drawn = {r["fitted"]: r["nlpd"] for r in mine if r["method"] == "sampling"}
            if ours and len(drawn) == 2:
                yield Posterior(family, kind, ours[0], drawn[False], drawn[True])


# -- whether outliers are found

SCORES = {"plain model": GREY, "temperature scaling": PINK}
SCORES |= {"streamlined": BLUE, "linearised": GREEN}
ENGINES = ("streamlined", "linearised")


def outliers(records: Records) -> Picture | None:
    """AUROC of the predictive entropy, by method, on every network that was calibrated."""
    networks = [r for r in records.values() if "network" in r]
    rows = {f"{TITLES[r['network']]}, {TITLES[r['set']]}": _by_method(r["rows"]) for r in networks}
    if not rows:
        return None
    values = {(m, colour): [row[m]["auroc"] for row in rows.values()] for m, colour in SCORES.items()}
    averages = {m: mean(v) for (m, _), v in values.items()}
    told = ", ".join(f"{m} {a:.2f}" for m, a in averages.items())
    shifts = [row["linearised"]["against"] for row in rows.values()]
    level = sum(shift <= error for shift, error in shifts)
    sentence = (
        f"Inputs of another data set, found by the entropy of calibrated predictions (mean AUROC): {told}. On test "
        f"data, the NLPD of linearised is within a standard error of temperature scaling, or better, on {level} of "
        f"{len(shifts)} networks."
    )
    return _bars(list(rows), values, "AUROC of the entropy", low=0.5), sentence


def _by_method(rows: Sequence[Record]) -> dict[str, Record]:
    """The row of each method, with the tolerance that is the default."""
    return {row["method"]: row for row in rows if row["method"] not in ENGINES or row["tolerance"] == TOLERANCE}


PICTURES: dict[tuple[str, ...], Callable[[Records], Picture | None]] = {  # by experiments; the first are shown
    ("runtime",): cost,
    ("uci", "mnist", "vit"): quality,
    ("calibration",): outliers,
}


def _bars(
    groups: Sequence[str],
    values: Mapping[tuple[str, str], Sequence[Any]],
    label: str,
    logarithmic: bool = False,
    low: float = 0.0,
) -> str:
    """Horizontal bars, a group for each of `groups`; `values` are by name and colour of the method."""
    with plots.drawing(WIDTH, HEIGHT) as (figure, svg):
        axis = figure.subplots()
        high = 0.8 / len(values)
        for i, ((name, colour), numbers) in enumerate(values.items()):
            places = [g + (i + 0.5) * high - 0.4 for g, v in enumerate(numbers) if v is not None]
            axis.barh(places, [v for v in numbers if v is not None], 0.9 * high, color=colour, label=name)
        axis.set(yticks=range(len(groups)), yticklabels=groups, xlabel=label)
        axis.invert_yaxis()
        axis.set(**({"xscale": "log"} if logarithmic else {"xlim": (low, 1.0)}))
        axis.grid(axis="x")
        figure.legend(loc="outside upper center", ncols=2, fontsize=8)
        return svg()


def _short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"
