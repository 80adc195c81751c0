"""`calibrate`: calibration that keeps as much of the posterior's variance as held-out data allow.

For a scale `s`, what the likelihood has to fit (`θ`: a temperature after the link, or the noise) is fitted:

    loss_n(s) = -log E[p(y_n | f, θ_s)],  f ~ N(m_n, s C_n),    θ_s = argmin_θ mean_n loss_n

Of the scales `s ≤ max(1, s*)`, `s*` that of least mean loss, the largest is taken for which

    mean_n d_n ≤ tolerance · std_n(d_n) / √N,    d_n = loss_n(s) - loss_n(s*)

As `s` vanishes, this is the plain model with a temperature (or a noise), which is therefore always among the
candidates. Scales above the posterior's own, 1, are taken only as far as the data ask for them: a link divides logits
by their standard deviation, which a temperature undoes, so that data may leave all large scales alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from scipy.optimize import minimize_scalar

from propagauss.likelihoods.base import Likelihood
from propagauss.predictive.calibration.held_out import HeldOut, cache, highest_scale
from propagauss.predictive.calibration.report import FitReport
from propagauss.predictive.calibration.trials import LOWEST, Trial, Trials, densities_of, paired

TOLERANCE = 1.0
HIGHEST = 1e30
NOTHING = 1e-6  # a difference in NLPD that nobody will notice
STEADY = 1e-7  # if no loss changes by more than this over a factor of ten, the limit is reached
HOPELESS = 10.0  # nats above the best; larger scales are no better
ALIKE = 1e-3  # losses that differ by less are those of the same predictions
CLOSE = 1.05  # two scales that are told apart no further
COARSE = 2.0  # the same, to compare many predictors
_NARROW = "the posterior is so narrow that predictions are those of the plain model"

T = TypeVar("T", bound=Likelihood)


@dataclass(frozen=True)
class Calibration(FitReport):
    """What `calibrate` did, and why: `after` is the largest scale that the data allow."""

    bounds: tuple[float, float] = (LOWEST, HIGHEST)
    tolerance: float = TOLERANCE
    best: float = 1.0  # the scale of least NLPD
    nlpd_best: float = math.nan
    nlpd_plain: float = math.nan  # with the latent variance scaled away
    error: float = 0.0  # standard error of the difference in NLPD between `after` and `best`, paired over points
    undetermined: bool = False  # whether one of the likelihood's own numbers is at the end of its range
    is_plain: bool = False  # whether predictions are those without any latent variance
    lacking: str = ""  # what the data lack, so that nothing was fitted

    @property
    def is_narrow(self) -> bool:
        """Whether the latent variance does not matter even if it is not made smaller."""
        return self.is_plain and self.after >= 1

    def __str__(self) -> str:
        return f"{super().__str__().removesuffix(' (at the end of the range)')}; {self.why}"

    @property
    def why(self) -> str:
        """Why this scale, in one sentence."""
        within = f"within {self.tolerance:g} standard error{'' if self.tolerance == 1 else 's'} of"
        plain = f"without latent variance {self.nlpd_plain:.4f}"
        if self.lacking:
            return f"nothing was fitted: {self.lacking}"
        if self.is_narrow:
            return f"{_NARROW}, at any scale up to {self.after:.3g}"
        if self.is_plain:
            return f"the data prefer the plain model: no scale that matters is {within} its NLPD"
        if self.at_bound:
            return f"the end of its range decided, not the data ({plain})"
        if self.after == self.best:
            return f"this scale has the least NLPD ({plain})"
        limit = " up to the posterior's own" if self.after == 1 else ""
        return f"the largest scale{limit} {within} the least NLPD, {self.nlpd_best:.4f} at {self.best:.3g} ({plain})"


def calibrate(
    net: Any, loader: Iterable[Any], likelihood: T, start: float, tolerance: float, progress: bool = True
) -> tuple[Calibration, T]:
    """What was done, and the likelihood with the numbers that were found; the latents are computed once."""
    held = cache(net, loader, likelihood, progress)
    report, fitted = calibrated(held, likelihood, start, tolerance)
    _warn(report)
    return report, fitted


def calibrated(
    held: HeldOut, likelihood: T, start: float, tolerance: float, close: float = CLOSE
) -> tuple[Calibration, T]:
    """As `calibrate`, from cached latents, and without warnings; scales within a factor of `close` count as one."""
    lacking = likelihood.lacking(held.batches)
    if lacking:
        nlpd = -sum(each.sum().item() for each in densities_of(held, likelihood, start)) / held.targets
        return Calibration("scale", start, start, nlpd, nlpd, held.points, best=start, lacking=lacking), likelihood
    trials = Trials(held, likelihood)
    plain = trials.plain
    highest = highest_scale(held, HIGHEST)
    if highest is None:  # there is no variance that could be scaled
        best = chosen = replace(plain, scale=start)
    else:
        best = _best(trials, highest, close)
        chosen = _largest(trials, best, max(1.0, best.scale), tolerance, close)
    own = {} if chosen.numbers is None else {trials.name: chosen.numbers}
    report = Calibration(
        "scale",
        start,
        chosen.scale,
        trials.as_given(start),
        chosen.nlpd,
        held.points,
        own,
        (LOWEST, highest or HIGHEST),
        tolerance,
        best.scale,
        best.nlpd,
        plain.nlpd,
        paired(chosen.losses, best.losses)[1],
        trials.is_at_end(chosen),
        highest is not None and (chosen.losses - plain.losses).square().mean().sqrt().item() < ALIKE,
    )
    return report, cast(T, trials.likelihood_of(chosen))


# -- which scale


def _best(trials: Trials, highest: float, close: float) -> Trial:
    """The scale of least NLPD: a step per decade, outwards from 1 to where nothing changes, then a finer search."""
    start, steady = min(1.0, highest), STEADY if close < COARSE else ALIKE / 10
    for factor, end in ((0.1, LOWEST), (10.0, highest)):
        here = trials.at(start)
        while here.scale != end:
            there = here.scale * factor
            there = end if (there - end) * (factor - 1) > 0 or math.isclose(there, end) else there
            before, here = here, trials.at(there)
            if (here.losses - before.losses).abs().max() < steady:
                break
            if factor > 1 and not here.nlpd < min(trial.nlpd for trial in trials.known) + HOPELESS:
                break
    best = min(trials.known, key=lambda trial: trial.nlpd)
    bracket = [math.log(min(max(best.scale * f, LOWEST), highest)) for f in (0.1, 10.0)]
    settings: Any = {"bounds": bracket, "method": "bounded", "options": {"xatol": math.log(close) / 2}}
    if best.scale > 2 * LOWEST:
        minimize_scalar(lambda t: trials.at(math.exp(t)).nlpd, **settings)
    # a tie goes to the posterior's own scale: a bridge without variance to speak of, for one, does not see any
    return min(trials.known, key=lambda trial: (round(trial.nlpd, 10), abs(math.log(trial.scale))))


def _largest(trials: Trials, best: Trial, most: float, tolerance: float, close: float) -> Trial:
    """The largest scale up to `most` that the data do not tell from the best, or not by enough."""

    def allowed(trial: Trial) -> bool:
        mean, error = paired(trial.losses, best.losses)
        return mean <= tolerance * error + NOTHING

    tried = [trial for trial in trials.known if trial.scale <= most]
    good = max((t for t in tried if allowed(t)), key=lambda t: t.scale, default=best)
    above = [t.scale for t in tried if t.scale > good.scale]
    end = min(above, default=good.scale)
    while end / good.scale > close:
        middle = trials.at(math.sqrt(end * good.scale))
        good, end = (middle, end) if allowed(middle) else (good, middle.scale)
    return good


# -- words


def _warn(report: Calibration) -> None:
    """Say so if the end of a range decided rather than the data."""
    trouble = []
    if report.lacking:
        trouble.append(f"nothing was calibrated: {report.lacking}")
    elif report.is_narrow:
        trouble.append(f"{_NARROW}: fit it again with a smaller prior precision, or with more random parameters")
    elif report.is_plain:
        trouble.append(
            "the validation data prefer the plain model, so the latent variance was scaled away: try a larger prior "
            "precision, fewer random parameters or pg.linearise, or raise tolerance="
        )
    elif report.at_bound:
        trouble.append(
            f"the scale is at the end of its range, {report.after:.3g}: the posterior is far too narrow for these "
            "data; fit it again with a smaller prior precision"
        )
    if report.undetermined:
        (name, values), *_ = report.own.items()
        trouble.append(
            f"the {name} is at the end of its range ({values.flatten().tolist()}): {report.points} validation points "
            "do not determine it; give more of them"
        )
    for each in trouble:
        warnings.warn(each, stacklevel=4)
