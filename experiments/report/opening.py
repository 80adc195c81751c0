"""What the report opens with: up to three pictures with a sentence each, made from whatever is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.frame.experiment import Mode, Record
from experiments.frame.store import Store
from experiments.report import html
from experiments.tasks.calibration import TITLES
from propagauss.demo.report import plots
from propagauss.predictive.calibrate import TOLERANCE

WIDTH, HEIGHT, MOST = 4.4, 3.0, 3
Records = Mapping[str, Record]
Picture = tuple[str, str]  # SVG, sentence
GREY, ORANGE, GREEN, BLUE, PINK = "#8a8f98", "#e08e0b", "#1fa87f", "#2f7fd1", "#c86da2"  # those of the other figures


def opening(results: Path, mode: Mode) -> str:
    """HTML of the first pictures that have their records; nothing if none has."""
    shown = []
    for name, picture in PICTURES.items():
        records = {key: record["results"] for key, record in Store(results, name, mode).records().items()}
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
    times = {NETWORKS[key]: records[key]["times"] for key in NETWORKS if key in records}
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

FAMILIES = {"uci": ("o", "UCI regression"), "images": ("s", "MLP on images"), "vit": ("^", "ViT")}
KINDS = {"LA": ORANGE, "MFVI": BLUE}


def quality(records: Records) -> Picture | None:
    """NLPD of sampling with most draws against that of one streamlined pass, of all posteriors."""
    pairs = [
        (record["family"], kind, curve["ours"]["nlpd"], curve["points"][-1]["nlpd"])
        for record in records.values()
        for kind, curve in record.get("curves", {}).items()
    ]
    if not pairs:
        return None
    with plots.drawing(WIDTH, HEIGHT) as (figure, svg):
        axis = figure.subplots()
        for family, kind, ours, sampled in pairs:
            axis.plot([ours], [sampled], FAMILIES[family][0], color=KINDS[kind], markersize=5, alpha=0.8)
        ends = [min(min(p[2:]) for p in pairs), max(max(p[2:]) for p in pairs)]
        axis.plot(ends, ends, color=GREY, linewidth=0.8)
        for kind, colour in KINDS.items():
            axis.plot([], [], "o", color=colour, label=kind)
        for marker, name in FAMILIES.values():
            axis.plot([], [], marker, color=GREY, label=name)
        axis.set(xlabel="NLPD, streamlined: one pass", ylabel="NLPD, sampling: most draws")
        axis.grid()
        figure.legend(loc="outside upper center", ncols=3, fontsize=8)
        drawn = svg()
    told = " and ".join(f"{_better(pairs, kind)} of {sum(p[1] == kind for p in pairs)} {kind}" for kind in KINDS)
    sentence = (
        f"For {told} posteriors, one streamlined pass with a fitted scale has a lower NLPD (above the line) than "
        f"sampling with {_draws(records)} draws from the posterior as it is."
    )
    return drawn, sentence


def _better(pairs: Sequence[tuple[str, str, float, float]], kind: str) -> int:
    return sum(ours < sampled for _, k, ours, sampled in pairs if k == kind)


def _draws(records: Records) -> str:
    most = [c["points"][-1]["samples"] for r in records.values() for c in r.get("curves", {}).values()]
    return f"{min(most):,} to {max(most):,}"


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


PICTURES: dict[str, Callable[[Records], Picture | None]] = {  # by experiment, the first of which are shown
    "runtime": cost,
    "mc-samples": quality,
    "calibration": outliers,
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
