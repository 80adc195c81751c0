"""What `calibrate` did, and why, in words."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from propagauss.predictive.calibration import FitReport

TOLERANCE = 1.0
LOWEST, HIGHEST = 1e-30, 1e30
_NARROW = "the posterior is so narrow that predictions are those of the plain model"


@dataclass(frozen=True)
class Calibration(FitReport):
    """What `calibrate` did, and why: `after` is the largest scale that the data allow."""

    tolerance: float = TOLERANCE
    best: float = 1.0  # the scale of least NLPD
    nlpd_best: float = math.nan
    nlpd_plain: float = math.nan  # with the latent variance scaled away
    error: float = 0.0  # standard error of the difference in NLPD between `after` and `best`, paired over points
    bounds: tuple[float, float] = (LOWEST, HIGHEST)
    undetermined: bool = False  # whether one of the likelihood's own numbers is at the end of its range
    is_plain: bool = False  # whether predictions are those without any latent variance
    lacking: str = ""  # what the data lack, so that nothing was fitted

    @property
    def at_bound(self) -> bool:
        return any(abs(math.log(self.after / bound)) < 1e-3 for bound in self.bounds)

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
            end = "the largest at which variances are finite" if self.after > 1 else "the smallest"
            return f"the end of its range decided, not the data: this scale is {end} ({plain})"
        if self.after == self.best:
            return f"this scale has the least NLPD ({plain})"
        limit = " up to the posterior's own" if self.after == 1 else ""
        return f"the largest scale{limit} {within} the least NLPD, {self.nlpd_best:.4f} at {self.best:.3g} ({plain})"


def warn_of(report: Calibration) -> None:
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
