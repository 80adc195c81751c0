"""What the numbers show: generated, so that they stay true when the numbers change."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from experiments.frame.experiment import Record
from experiments.published import valla as published
from experiments.valla.summary import Summary, cost
from experiments.valla.ways import BATCH, ML, ROTATED, Way, title

SETS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
EXACT = Way("kronecker", ML, "linearised", "mean_field", "calibrate")
RAW = Way("kronecker", ML, "linearised", "probit", "as it is")
LAST = Way("last layer", ML, "linearised", "mean_field", "calibrate")
STREAMLINED = Way("kronecker", ML, "streamlined", "probit", "calibrate")
PLAIN, TEMPERATURE = Way(), Way(calibration="temperature")
BUDGET = 5.0
NEAR = 0.003  # in accuracy


def readings(found: Mapping[str, Summary], records: Mapping[str, Record]) -> list[str]:
    lines = []
    for name, summary in found.items():
        lines += [_networks(name, summary), _aim(name, summary, records.get("cost"))]
        lines.append(_relative(name, summary, records.get("cost")))
        lines += [_requirement(name, summary), _own_scale(name, summary), _losses(name, summary)]
    if "laplace-torch" in records:
        lines.append(_check(records["laplace-torch"]))
    lines += _rotations(records)
    return [line for line in lines if line]


def _networks(name: str, summary: Summary) -> str:
    rates = sorted({r["rate"] for r in summary.records})
    tried = ", ".join(f"{rate}: {loss:.4f}" for rate, loss in summary.records[0]["rates"].items())
    accuracy, nll = summary.mean(PLAIN, "accuracy"), summary.mean(PLAIN, "nlpd")
    theirs = published.NUMBERS[name]["MAP"]["nlpd"]
    text = (
        f"{SETS[name]}, the networks: learning rate {', '.join(map(str, rates))}, that of least validation loss "
        f"({tried}). The plain model has accuracy {accuracy:.4f} and NLL {nll:.4f} (published {theirs:.4f}"
    )
    known = published.ACCURACY.get(name)
    if known is None:
        return f"{text})."
    verdict = "near it" if abs(accuracy - known) <= NEAR else "not near it, so that published cells compare loosely"
    return f"{text}, accuracy {known:.3f}: {verdict})."


def _aim(name: str, summary: Summary, times: Record | None) -> str:
    """No worse than the best published cell in NLL and in OOD, at no more than five forward passes."""
    cells = published.NUMBERS[name]
    nll, ood = min(c["nlpd"] for c in cells.values()), max(c["entropy"] for c in cells.values())
    asked = f"NLL at most {nll:.4f} and OOD at least {ood:.3f} for at most {BUDGET:g} forward passes"
    cheap = [w for w in summary.ways if w.engine and (cost(times, w, BATCH) or 0) <= BUDGET]
    both = [w for w in cheap if summary.mean(w, "nlpd") <= nll and summary.mean(w, "entropy") >= ood]
    fixed = summary.mean(EXACT, "nlpd"), summary.mean(EXACT, "entropy"), cost(times, EXACT, BATCH)
    own = (
        f"The default, linearised with `calibrate`, has NLL {fixed[0]:.4f} ({fixed[0] - nll:+.4f}), OOD {fixed[1]:.3f} "
        f"({fixed[1] - ood:+.3f})" + ("" if fixed[2] is None else f" at {fixed[2]:.1f} passes")
    )
    variance = summary.mean(EXACT, "variance")
    more = f"; by the variance of the logits its OOD is {variance:.3f}"
    state = f"{len(both) or 'none'} of the {len(cheap)} ways tried here that cost no more than that reach both"
    return f"{SETS[name]}, the best published cells ask for {asked}: {state}. {own}{more}."


def _requirement(name: str, summary: Summary) -> str:
    """`calibrate` with the exact engine against temperature scaling."""
    mean, error = summary.gap(EXACT)
    gains = [
        a - b for a, b in zip(summary.values(EXACT, "entropy"), summary.values(TEMPERATURE, "entropy"), strict=True)
    ]
    rows = [row for row, gain in zip(summary.rows[EXACT], gains, strict=True) if gain >= 0.02]
    paired = [row for row in rows if row["against"][0] <= row["against"][1]]
    alone = [row for row in rows if row["against"][0] <= row["nlpd_error"]]
    return (
        f"{SETS[name]}, `calibrate` with the exact engine against temperature scaling: NLL {mean:+.4f} ± {error:.4f}, "
        f"OOD {statistics.mean(gains):+.3f} (at least {min(gains):+.3f}). No more than one standard error worse and at "
        f"least 0.02 better in OOD: for {len(alone)} of {len(gains)} networks by the standard error of the NLL itself "
        f"({summary.mean(EXACT, 'nlpd_error'):.4f}), for {len(paired)} by that of the difference, paired over images."
    )


def _relative(name: str, summary: Summary, times: Record | None) -> str:
    """What each method adds to the network it starts from, since networks differ."""
    base = published.NUMBERS[name]["MAP"]
    parts = [
        f"{method} (published) {c['nlpd'] - base['nlpd']:+.4f} and {c['entropy'] - base['entropy']:+.3f}"
        for method, c in published.NUMBERS[name].items()
        if c is not base
    ]
    for way in (TEMPERATURE, LAST, STREAMLINED, RAW, EXACT):
        nll, ood = (summary.mean(way, metric) - summary.mean(PLAIN, metric) for metric in ("nlpd", "entropy"))
        found = cost(times, way, BATCH)
        passes = "" if found is None else f", {found:.1f} passes"
        parts.append(f"{title(way)} {nll:+.4f} and {ood:+.3f}{passes}")
    return f"{SETS[name]}, NLL and OOD minus those of the plain model of the same work: {'; '.join(parts)}."


def _own_scale(name: str, summary: Summary) -> str:
    """The table of the design: plain, temperature, the paper's scale, a temperature at the posterior's own scale."""
    told = {"plain": PLAIN, "temperature": TEMPERATURE}
    for engine, link in (("streamlined", "probit"), ("linearised", "mean_field")):
        told[f"{engine}, scale fitted"] = Way("kronecker", ML, engine, link, "scale")
        told[f"{engine}, temperature at scale 1"] = Way("kronecker", ML, engine, link, "temperature")
    known = {label: way for label, way in told.items() if way in summary.rows}
    parts = [
        f"{label} {summary.mean(way, 'nlpd'):.4f}/{summary.mean(way, 'ece'):.4f}/{summary.mean(way, 'entropy'):.3f}"
        for label, way in known.items()
    ]
    scales = [row["scale"] for label, way in known.items() if "fitted" in label for row in summary.rows[way]]
    return (
        f"{SETS[name]}, NLL/ECE/OOD by entropy: {'; '.join(parts)}. Fitted scales are between {min(scales):.2g} and "
        f"{max(scales):.2g}."
    )


def _losses(name: str, summary: Summary) -> str:
    """Where a posterior makes things worse than temperature scaling, by more than two standard errors."""
    worse = [w for w in summary.ways if w.engine and summary.gap(w)[0] > 2 * summary.gap(w)[1]]
    calibrated = [w for w in worse if w.calibration == "calibrate"]
    every = [w for w in summary.ways if w.engine]
    most = max(every, key=lambda w: summary.gap(w)[0])
    return (
        f"{SETS[name]}, what loses: {len(worse)} of {len(every)} ways have an NLL more than two standard errors above "
        f"temperature scaling, {len(calibrated)} of them with `calibrate`; the worst is {most.engine} "
        f"{most.posterior} {most.calibration} with {summary.gap(most)[0]:+.4f}. The posterior of the marginal "
        f"likelihood as it is, linearised: {summary.difference(RAW)}."
    )


def _check(record: Record) -> str:
    nll = record["nlpd"]
    return (
        f"laplace-torch, Kronecker over all parameters, fitted to {record['train']:,} training images, on "
        f"{record['points']:,} test images: its own posterior linearised here differs by at most "
        f"{record['same_posterior']:.1e} (relative, whole covariances), our fit by {record['own_fit']:.1e}; NLL "
        f"{nll['laplace-torch']:.4f} there, {nll['ours']:.4f} here."
    )


def _rotations(records: Mapping[str, Record]) -> list[str]:
    mine = [r for r in records.values() if r.get("curves")]
    if not mine:
        return []
    parts: Sequence[str] = [
        f"{title(way)} {_over(mine, index, 'nlpd'):.2f}/{_over(mine, index, 'ece'):.3f}"
        for index, way in enumerate(ROTATED)
        if all(str(index) in r["curves"] for r in mine)
    ]
    return [f"Rotated MNIST, NLL/ECE averaged over angles from 0 to 180 degrees: {'; '.join(parts)}."]


def _over(records: Sequence[Record], index: int, metric: str) -> float:
    return statistics.mean(at[metric] for r in records for at in r["curves"][str(index)])
