"""What the numbers of the UCI sets show, in sentences made from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from experiments.frame.experiment import Record
from experiments.published import uci as published
from experiments.uci import layers as uci_layers
from experiments.uci.methods import STDDEV
from experiments.uci.summary import FITTED, PAPER, Summary, bold_counts

NEAR = 0.005  # difference in NLPD called none


def readings(sets: Sequence[Summary], layers: Mapping[str, Sequence[Record]]) -> list[str]:
    """`layers`: the records of uci_layers, by set."""
    found = [_counts(sets, metric) for metric in ("nlpd", "rmse")]
    for kind in PAPER:
        for s in sets:
            if not s.bold("nlpd", PAPER[kind])[f"{kind} ours"]:
                cut = f" {uci_layers.reading(layers[s.name])}" if kind == "LA" and s.name in layers else ""
                found.append(_lost(s, kind) + cut)
    found += [text for text in (_glm(sets), _second_order(layers)) if text]
    return [*found, _mean_weights(sets), _fitted(sets), *_widths(sets), *_uneven(sets), _against_paper(sets)]


def _counts(sets: Sequence[Summary], metric: str) -> str:
    """Bold counts, and whether they are what the paper's would lead one to expect."""
    n, counts = len(sets), bold_counts(sets, metric, PAPER)
    folds = {m: 0 for group in PAPER.values() for m in group}
    for s in sets:
        for group in PAPER.values():
            for m, b in s.bold_by_folds(metric, group).items():
                folds[m] += b
    table = published.NLPD if metric == "nlpd" else published.RMSE
    shown = "; ".join(
        f"{kind}: " + ", ".join(f"{m.removeprefix(kind + ' ')} {counts[m]}/{n}" for m in group)
        for kind, group in PAPER.items()
    )
    paper = ", ".join(f"{m} {sum(row[m][2] for row in table.values())}" for group in PAPER.values() for m in group)
    checks = [
        _check("MFVI ours at least as often as sampling", counts["MFVI ours"] >= counts["MFVI sampling"]),
        _check("LA ours at least as often as sampling", counts["LA ours"] >= counts["LA sampling"]),
        _check("LA ours within one of GLM", counts["LA ours"] >= counts["LA GLM"] - 1),
    ]
    by_folds = ", ".join(f"{m} {v}" for m, v in folds.items())
    return (
        f"{metric.upper()}, best or not told apart from it: {shown} (paper, of 11: {paper}). {'; '.join(checks)}. With "
        f"the test over folds in place of test points: {by_folds}."
    )


def _check(text: str, holds: bool) -> str:
    return f"{text}: {'yes' if holds else 'no'}"


def _lost(s: Summary, kind: str) -> str:
    """Where ours is not bold: by how much, and what the stored numbers say about why."""
    ours, group = f"{kind} ours", PAPER[kind]
    best = min(group, key=lambda m: s.mean("nlpd", m))
    gap = s.mean("nlpd", ours) - s.mean("nlpd", best)
    text = f"{s.name}, {kind}: ours loses to {best.removeprefix(kind + ' ')} by {gap:.3f}. "
    return text + " ".join(_causes(s, kind, best, gap))


def _causes(s: Summary, kind: str, best: str, gap: float) -> list[str]:
    ours, found = f"{kind} ours", []
    points = s.folds[0]["parts"]["validation"]
    fitted = f"{best}, scale fitted"
    cost = s.mean("nlpd", fitted) - s.mean("nlpd", best)
    rest = s.mean("nlpd", ours) - s.mean("nlpd", fitted)
    found.append(
        f"{best.removeprefix(kind + ' ')} with its scale fitted on the same {points} validation points changes by "
        f"{cost:+.3f}, and ours is {rest:+.3f} from that: {_blame(cost / gap)}."
    )
    if s.at_bound(ours):
        where = [v for v, b in zip(s.values("scale", ours), s.values("at_bound", ours), strict=True) if b]
        end = "lower" if max(where) < 1 else "upper"
        found.append(
            f"In {s.at_bound(ours)} of {len(s.folds)} folds the scale is at the {end} end of its range: there the "
            "errors on the validation part leave no room for a latent variance beside the noise."
        )
    gaps = [a - b for a, b in zip(s.values("nlpd", ours), s.values("nlpd", best), strict=True)]
    worst = max(range(len(gaps)), key=lambda i: gaps[i])
    extra = s.values("worst", ours)[worst] - s.values("worst", best)[worst]
    share = extra / (s.folds[worst]["parts"]["test"] * len(gaps) * gap) if gap > 0 else 0.0
    found.append(
        f"Most of it in fold {s.folds[worst]['fold']} ({gaps[worst]:+.3f}), whose largest single loss alone makes "
        f"{100 * share:.0f}% of the gap of all folds."
        if share > 0.2
        else f"Largest in fold {s.folds[worst]['fold']} ({gaps[worst]:+.3f}), not because of a single point."
    )
    return found


def _glm(sets: Sequence[Summary]) -> str:
    """Why GLM is bold more often than in the paper, if it is."""
    group = PAPER["LA"]
    lost = [s for s in sets if not published.NLPD[s.name]["LA GLM"][2]]
    regained = [s for s in lost if s.bold("nlpd", group)["LA GLM"]]
    if not regained:
        return ""
    changes = [s.mean("nlpd", "LA GLM, scale fitted") - s.mean("nlpd", "LA GLM") for s in regained]
    return (
        f"In the paper GLM is not bold on {_list([s.name for s in lost])}; here it is on "
        f"{_list([s.name for s in regained])}. A fitted scale would change its NLPD there by {min(changes):+.3f} to "
        f"{max(changes):+.3f}: with prior precision and noise from the marginal likelihood GLM has nothing for a scale "
        "to correct."
    )


def _second_order(layers: Mapping[str, Sequence[Record]]) -> str:
    """What the terms of second order do, over all sets."""
    if not layers:
        return ""
    means = {name: uci_layers.mean(records) for name, records in layers.items()}
    change = {n: m[uci_layers.OURS]["nlpd"] - m[uci_layers.LAYERS]["nlpd"] for n, m in means.items()}
    wider = statistics.median(m[uci_layers.OURS][STDDEV] / m[uci_layers.LAYERS][STDDEV] for m in means.values())
    cut = statistics.median(m[uci_layers.LAYERS][STDDEV] / m[uci_layers.JOINT][STDDEV] for m in means.values())
    worse, better = ([n for n, c in change.items() if sign * c > NEAR] for sign in (1, -1))
    matched = {n: m[uci_layers.MOMENTS]["nlpd"] - m[uci_layers.OURS]["nlpd"] for n, m in means.items()}
    return (
        f"LA, latents before any fit: cutting the covariance between layers widens those of GLM {cut:.1f} times, the "
        f"terms of second order by another {wider:.1f} (medians over sets). With fitted scales those terms raise the "
        f"NLPD by more than {NEAR} on {_list(worse)} and lower it on {_list(better)}. Matching moments in place of "
        f"linearising raises it on {_list([n for n, c in matched.items() if c > NEAR])} and lowers it on "
        f"{_list([n for n, c in matched.items() if c < -NEAR])}."
    )


def _blame(share: float) -> str:
    """What part of a gap comes with fitting a scale at all."""
    if share > 0.75:
        return "it is the fit of a scale that costs"
    if share < 0.25:
        return "it is not the fit of a scale, but how its variance is shared out among the points"
    return (
        f"{100 * share:.0f}% of it comes with the fit of a scale, the rest from how its variance is shared out among "
        "the points"
    )


def _mean_weights(sets: Sequence[Summary]) -> str:
    """Ours predicts the mean of the network at the mean weights; sampling averages networks."""
    parts = []
    for kind in PAPER:
        gaps = {s.name: s.mean("rmse", f"{kind} ours") - s.mean("rmse", f"{kind} sampling") for s in sets}
        lost = [s.name for s in sets if not s.bold("rmse", PAPER[kind])[f"{kind} ours"]]
        where = f" (told apart, and worse, on {', '.join(f'{n} {gaps[n]:+.3f}' for n in lost)})"
        parts.append(f"{kind} {statistics.median(gaps.values()):+.3f}" + (where if lost else ""))
    return (
        "The mean of ours is the network at the mean weights, that of sampling an average of networks. RMSE of ours "
        f"less that of sampling, median over sets: {'; '.join(parts)}."
    )


def _fitted(sets: Sequence[Summary]) -> str:
    """The comparison in which no method has an advantage."""
    n, counts = len(sets), bold_counts(sets, "nlpd", FITTED)
    shown = "; ".join(f"{kind}: " + ", ".join(f"{m} {counts[m]}/{n}" for m in group) for kind, group in FITTED.items())
    ahead = {
        kind: [s.name for s in sets if s.mean("nlpd", f"{kind} ours") < s.mean("nlpd", rival) - NEAR]
        for kind, rival in (("MFVI", "MFVI sampling, scale fitted"), ("LA", "LA GLM, scale fitted"))
    }
    behind = {
        kind: [s.name for s in sets if s.mean("nlpd", f"{kind} ours") > s.mean("nlpd", rival) + NEAR]
        for kind, rival in (("MFVI", "MFVI sampling, scale fitted"), ("LA", "LA GLM, scale fitted"))
    }
    return (
        f"The paper fits a scale for its own method only. With one number fitted for every method, NLPD best or tied: "
        f"{shown}. Beyond {NEAR}: LA ours below GLM on {_list(ahead['LA'])}, above it on {_list(behind['LA'])}; MFVI "
        f"ours below sampling on {_list(ahead['MFVI'])}, above it on {_list(behind['MFVI'])}."
    )


def _widths(sets: Sequence[Summary]) -> list[str]:
    """How wide the latents are before any fit."""
    found = []
    for kind in ("LA", "MFVI"):
        sampling, ours = (
            statistics.median(s.median(STDDEV, f"{kind} {m}") / s.median(STDDEV, f"{kind} GLM") for s in sets)
            for m in ("sampling", "ours")
        )
        scale = statistics.median(s.median("scale", f"{kind} ours") for s in sets)
        alone = statistics.median(
            s.mean("nlpd", f"{kind} ours, scale 1") - s.mean("nlpd", f"{kind} ours") for s in sets
        )
        bound = sum(s.at_bound(f"{kind} ours") for s in sets)
        folds = sum(len(s.folds) for s in sets)
        found.append(
            f"{kind}: standard deviations of the latent as it is, relative to GLM (median over sets): sampling "
            f"{sampling:.1f}, ours {ours:.1f}. The fitted scale of ours is {scale:.2g} (median) and lowers the NLPD by "
            f"{alone:.3f} (median); it is at the end of its range in {bound} of {folds} folds."
        )
    return found


def _against_paper(sets: Sequence[Summary]) -> str:
    parts = []
    for m in ("MFVI sampling", "MFVI ours", "LA sampling", "LA GLM", "LA ours"):
        lower = sum(s.mean("nlpd", m) < published.NLPD[s.name][m][0] for s in sets)
        change = statistics.median(s.mean("nlpd", m) - published.NLPD[s.name][m][0] for s in sets)
        parts.append(f"{m} {change:+.2f} (lower on {lower} of {len(sets)})")
    return f"NLPD here less the paper's, median over sets: {', '.join(parts)}."


def _uneven(sets: Sequence[Summary]) -> list[str]:
    """Sets of which one fold decides."""
    found = []
    for s in sets:
        values, worst = s.values("rmse", "LA GLM"), s.values("worst", "LA GLM")
        if max(values) > 2.5 * statistics.median(values):
            i = values.index(max(values))
            losses = [f"{m} {s.values('worst', m)[i]:.0f}" for m in ("MAP", "LA GLM", "LA ours")]
            share = worst[i] / (s.folds[i]["parts"]["test"] * s.values("nlpd", "LA GLM")[i])
            found.append(
                f"{s.name}: RMSE of LA GLM and ours is {values[i]:.2f} in fold {s.folds[i]['fold']} and "
                f"{statistics.median(values):.2f} in the median fold; one test point makes {100 * share:.0f}% of the "
                f"NLPD of GLM there. Largest loss of a point in that fold: {', '.join(losses)}."
            )
    return found


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
