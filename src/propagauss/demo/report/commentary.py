"""What the numbers say, in sentences made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from propagauss.demo.methods import EXACT, OURS, Result, best, chosen, is_tied
from propagauss.demo.regression import Band
from propagauss.predictive.calibration import BOUNDS


def _of(results: Sequence[Result], method: str, fitted: bool = True) -> list[Result]:
    return [r for r in results if r.method == method and r.fitted is fitted]


def verdict(results: Sequence[Result]) -> list[str]:
    """Which method does best, and how ours does against the others; variants are chosen on the validation part."""
    methods = dict.fromkeys(r.method for r in results)
    taken = {method: chosen([r for r in results if r.method == method]) for method in methods}
    winner, ours = best(list(taken.values())), taken.pop(OURS)
    lines = [f"The least NLPD is that of {describe(winner)}: {winner.nlpd:.3f}."]
    if ours is not winner:
        lines.append(f"Ours is {describe(ours)}: {_against(ours, winner)}.")
    for other in taken.values():
        if other is not winner:
            lines.append(f"Against {describe(other)} ({other.nlpd:.3f}), ours is {_against(ours, other)}.")
    return lines


def prior(priors: Mapping[float, float]) -> str:
    """Which prior precision was taken, from the validation NLPD of the plain model for each."""
    taken = min(priors, key=lambda precision: priors[precision])
    tried = ", ".join(f"{precision:g}: {nlpd:.3f}" for precision, nlpd in priors.items())
    return (
        f"The weight decay is that of a prior precision of {taken:g}, with which the plain model has the least NLPD "
        f"on the validation part ({tried}). It was chosen before any posterior was fitted."
    )


def scales(results: Sequence[Result]) -> str:
    """What fitting on the validation part does to each method."""
    parts = []
    for method in ("sampling", EXACT, OURS):
        raw, fitted = chosen(_of(results, method, False)), chosen(_of(results, method))
        found = [r.scale for r in _of(results, method) if r.scale is not None]
        parts.append(
            f"{method} from {raw.nlpd:.3f} to {fitted.nlpd:.3f} (scales of {min(found):.2g} to {max(found):.2g})"
        )
    return f"Fitting on the validation part takes the NLPD of each method from that at scale 1: {'; '.join(parts)}."


def accuracies(results: Sequence[Result]) -> str:
    """What happens to the accuracy of MAP."""
    base = results[0].metrics["accuracy"]
    parts = []
    for method in ("sampling", EXACT, OURS):
        every = [r for r in results if r.method == method]
        worst = min(every, key=lambda r: r.metrics["accuracy"])
        parts.append(f"{method} {100 * worst.metrics['accuracy']:.1f}% (scale {worst.scale:.2g}, {worst.structure})")
    return f"MAP is right on {100 * base:.1f}% of the test points; the lowest accuracies are: {', '.join(parts)}."


def times(results: Sequence[Result], seconds: float, batch: int) -> str:
    """What predictions cost."""
    parts = []
    for method in ("sampling", EXACT, OURS):
        medians = [r.time.median for r in results if r.method == method and r.time]
        parts.append(f"{method} {min(medians):.1f} to {max(medians):,.0f} times")
    return (
        f"A plain forward pass of {batch} inputs takes {1e6 * seconds:.0f} µs, in a network this small mostly the "
        f"overhead of calling operations. Relative to it: {', '.join(parts)}. This counts the prediction only: "
        "weights were drawn, and posteriors and scales fitted, beforehand."
    )


def widths(bands: Sequence[Band]) -> list[str]:
    """How the bands at scale 1 compare with sampling, the reference for what a posterior implies."""
    lines = []
    for posterior in dict.fromkeys(b.posterior for b in bands):
        width = {b.method: b.latent.double().mean().item() for b in bands if b.posterior == posterior and not b.fitted}
        parts = " and ".join(f"{width[method] / width['sampling']:.2g} ({method})" for method in (EXACT, OURS))
        lines.append(
            f"{_capital(posterior)} posterior as it is: the mean width of the inner band is {parts} times that of "
            "sampling from the same posterior."
        )
        ends = [b.method for b in bands if b.posterior == posterior and b.fitted and (b.scale or 1) < 2 * BOUNDS[0]]
        if ends:
            lines.append(
                f"{_capital(posterior)} posterior, fitted: on the validation part {' and '.join(ends)} did best with "
                "no uncertainty about the weights at all (the scale is at the end of its range), which says nothing "
                "about the gap and the outside."
            )
    return lines


def describe(result: Result) -> str:
    extra = [result.posterior and f"{result.structure} posterior", result.link and result.link.replace("_", "-")]
    extra += ["scale 1"] if result.scale is not None and not result.fitted else []
    inside = ", ".join(part for part in extra if part)
    return result.method + (f" ({inside})" if inside else "")


def _against(ours: Result, other: Result) -> str:
    difference = ours.nlpd - other.nlpd
    error = torch.std((ours.losses - other.losses).double()).item() / len(ours.losses) ** 0.5
    word = "worse" if difference > 0 else "better"
    text = f"{word} by {abs(difference):.3f} ± {error:.3f}"
    return text + (", which these test points do not tell apart" if is_tied(ours, other) else "")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
