"""What a fit of one number did, and between which ends it searched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

BOUNDS = (1e-6, 1e6)


@dataclass(frozen=True)
class FitReport:
    """What a fit did: the number before and after, and the mean NLPD of the data it was fitted on."""

    name: str
    before: float
    after: float
    nlpd_before: float
    nlpd_after: float
    points: int
    own: Mapping[str, Tensor] = field(default_factory=dict)  # of the likelihood, fitted together with the scale
    bounds: tuple[float, float] = BOUNDS  # of the number

    @property
    def noise(self) -> Tensor | None:
        """Standard deviations of the observations, if they were fitted."""
        return self.own.get("noise")

    @property
    def at_bound(self) -> bool:
        """Whether the best value is at the end of the range, where the NLPD would still fall a little."""
        return any(abs(math.log(self.after / bound)) < 1e-3 for bound in self.bounds)

    def __str__(self) -> str:
        text = f"{self.name} {self.before:.4g} -> {self.after:.4g}"
        for name, values in self.own.items():
            text += f", {name} " + " ".join(f"{n:.4g}" for n in values.flatten().tolist())
        text += f": NLPD {self.nlpd_before:.4f} -> {self.nlpd_after:.4f} on {self.points} points"
        return text + (" (at the end of the range)" if self.at_bound else "")
