"""Both engines on the UCI sets with scale and noise fitted together, by `calibrate`, on the validation part.

For real numbers the noise has the part that a temperature has for classes: what the latent variance cannot explain goes
there. The networks are those of the other tables, trained again from the same seeds.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from experiments.frame.experiment import Record
from experiments.methods.classify import Remembered
from experiments.methods.engines import AS_IT_IS, CALIBRATED, FITTED, LINEARISED, STREAMLINED
from experiments.report import html
from experiments.uci.data import SETS
from experiments.uci.methods import EQUAL, Score, _batches, _normal, map_scores
from experiments.uci.posteriors import Fitted
from experiments.uci.summary import Summary, bold_counts, lines, mean_ranks
from propagauss.demo.data import Split
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.predictive.regressor import Regressor

PREFIX = "calibrated-"
KINDS = ("LA", "MFVI")
PLAIN = "mean weights, noise fitted"  # of LA, this is MAP
FORMS = (AS_IT_IS, FITTED, CALIBRATED)
NEAR = 0.005  # difference in NLPD called none
SAME = 1e-4  # in NLPD: the same network


def scores(kind: str, fitted: Fitted, split: Split) -> list[Score]:
    """The mean weights with a fitted noise, and each engine in all forms."""
    (plain,) = map_scores(fitted, split)
    found, example = [replace(plain, name=f"{kind} {PLAIN}")], split.test[0][:2]
    engines: dict[str, Callable[[], Any]] = {
        STREAMLINED: lambda: streamline(fitted.model, fitted.posterior, example, covariance="full"),
        LINEARISED: lambda: linearise(fitted.model, fitted.posterior, example),
    }
    for method, make in engines.items():
        found += _forms(f"{kind} {method}", make(), fitted, split)
    return found


@torch.no_grad()
def _forms(name: str, net: Any, fitted: Fitted, split: Split) -> list[Score]:
    latents, validation, test = Remembered(net), _batches(split.validation), _batches(split.test)
    stddev = torch.cat([latents(x).variance for x, _ in test]).sqrt().median().item()
    found = []
    for form in FORMS:
        regressor = Regressor(latents, fitted.noise)
        if form == FITTED:
            regressor.fit_scale(validation, progress=False)
        if form == CALIBRATED:
            with warnings.catch_warnings():  # that no latent variance is wanted is read off the stored scale
                warnings.simplefilter("ignore")
                regressor.calibrate(validation, progress=False)
        found.append(_normal(f"{name}, {form}", regressor, split, stddev, test))
    return found


# -- the report


def summaries(records: Mapping[str, Record]) -> list[Summary]:
    """Of the records of this file, in the order of the paper's table."""
    folds = {n: [r for r in records.values() if r["set"] == n and r.get("calibrated")] for n in SETS}
    return [Summary(f) for f in folds.values() if f]


def contests(sets: Sequence[Summary]) -> dict[str, list[str]]:
    """The methods of a posterior that have one or two numbers fitted."""
    fitted = [m for m in sets[0].methods if not m.endswith(AS_IT_IS)]
    return {kind: [m for m in fitted if m.startswith(kind)] for kind in KINDS}


def table(sets: Sequence[Summary], beside: Sequence[Summary]) -> str:
    """`beside` are the sets of the tables above."""
    if not sets:
        return html.paragraph("Scale and noise together, by `calibrate`: not run.")
    groups = contests(sets)
    rows = lines(sets, groups, lambda method: any(engine in method for engine in (STREAMLINED, LINEARISED)))
    folds = sum(len(s.folds) for s in sets)
    caption = (
        f"NLPD, means over folds ({folds} in all). Calibrated: scale and noise fitted together by `calibrate`, the "
        "largest scale that the validation part allows; scale fitted: with the noise of training. Bold, bold count and "
        f"mean rank are among the fitted methods of a posterior. {_networks(sets, beside)}"
    )
    return html.table(["method", *(s.name for s in sets), "bold", "rank"], rows, caption)


def headline(sets: Sequence[Summary]) -> str:
    """Bold counts and ranks of the fitted methods as a Markdown table; nothing if they were not run."""
    if not sets:
        return ""
    groups = contests(sets)
    counts, ranks = bold_counts(sets, "nlpd", groups), mean_ranks(sets, groups)
    text = [
        f"| the same {len(sets)} sets, all fitted on the validation part | NLPD best or tied | mean NLPD rank |",
        "|---|---|---|",
    ]
    for kind, methods in groups.items():
        for m in methods:
            name = m.replace(f"{kind} ", f"{kind}, ", 1)
            name = name if PLAIN in m else f"**{name}**"
            text.append(f"| {name} | {counts[m]}/{len(sets)} | {ranks[m]:.1f} of {len(methods)} |")
    return "\n".join(text)


def _networks(sets: Sequence[Summary], beside: Sequence[Summary]) -> str:
    """Whether training again gave the networks of the other tables."""
    above = {(s.name, f["fold"]): f["scores"] for s in beside for f in s.folds}
    gaps = [
        abs(f["scores"][f"{kind} {STREAMLINED}, {FITTED}"]["nlpd"] - above[s.name, f["fold"]][f"{kind} ours"]["nlpd"])
        for s in sets
        for f in s.folds
        for kind in KINDS
        if (s.name, f["fold"]) in above
    ]
    same = sum(gap < SAME for gap in gaps)
    if same == len(gaps):
        return "The networks are those of the tables above."
    return (
        f"Trained again from the same seeds, {same} of {len(gaps)} networks are those of the tables above; the others "
        "came out a little different: compare rows within a table."
    )


def readings(sets: Sequence[Summary]) -> list[str]:
    """What the noise adds to the scale, and whether the posterior helps at all, by engine."""
    return [_reading(sets, kind, method) for kind in KINDS for method in (STREAMLINED, LINEARISED)] if sets else []


def _reading(sets: Sequence[Summary], kind: str, method: str) -> str:
    name = f"{kind} {method}"
    both = f"{name}, {CALIBRATED}"
    told = [
        f"against {title}, {_compared(sets, both, other)}"
        for title, other in (
            ("a fitted scale alone", f"{name}, {FITTED}"),
            ("the mean weights with a fitted noise", f"{kind} {PLAIN}"),
        )
    ]
    scales = [v for s in sets for v in s.values("scale", both)]
    return (
        f"{name}, scale and noise by `calibrate`, NLPD on {len(sets)} sets: {'; '.join(told)}. The scale is "
        f"{statistics.median(scales):.2g} (median over {len(scales)} folds)."
    )


def _compared(sets: Sequence[Summary], one: str, other: str) -> str:
    """On how many sets a paired test over all test points tells the two apart, and by how much."""
    gaps = {s.name: s.mean("nlpd", one) - s.mean("nlpd", other) for s in sets}
    marks = {s.name: s.bold("nlpd", (one, other)) for s in sets}
    lower = [n for n, gap in gaps.items() if gap < -EQUAL and not marks[n][other]]
    higher = [n for n, gap in gaps.items() if gap > EQUAL and not marks[n][one]]
    return (
        f"lower on {_list(lower, gaps)}, higher on {_list(higher, gaps)}, the others not told apart "
        f"(median {statistics.median(gaps.values()):+.3f})"
    )


def _list(names: Sequence[str], gaps: Mapping[str, float]) -> str:
    return ", ".join(f"{n} ({gaps[n]:+.3f})" for n in names) if names else "none"
