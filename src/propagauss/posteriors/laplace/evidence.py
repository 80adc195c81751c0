"""Choosing the prior precision and the observation noise by the Laplace marginal likelihood.

    log Z(δ, σ) = log p(y | θ, σ) - ½ Σ_i log(1 + h_i / (δ σ²)) - ½ δ ‖θ‖²

with `h` the eigenvalues of the curvature `H` at unit noise, prior precision `δ`, `P` parameters `θ` and

    log p = -loss / σ² - n log(σ √2π),   n the number of target values, if the likelihood has a noise (regression)
    log p = -loss                        otherwise (n = 0 and σ = 1)

where the likelihood says what the loss is and whether it has a noise (propagauss.likelihoods).

Only the eigenvalues are needed, whatever the structure. With `ρ = δ σ²` the determinant does not depend on `σ`, and the
best noise for a given `ρ` is `σ² = (2 loss + ρ ‖θ‖²) / n`: even when both are free the search is in one dimension.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

LOWEST, HIGHEST, PER_DECADE = 1e-12, 1e12, 4


@dataclass(frozen=True)
class Evidence:
    """What the marginal likelihood depends on; `targets` (`n`) is 0 for a likelihood without noise."""

    eigenvalues: np.ndarray  # [P]
    squared_norm: float
    loss: float
    targets: int = 0

    def log_likelihood(self, noise: float) -> float:
        return -self.loss / noise**2 - self.targets * math.log(noise * math.sqrt(2 * math.pi))

    def log_marginal_likelihood(self, prior_precision: float, noise: float = 1.0) -> float:
        """`log Z(δ, σ)`, see the top of this file."""
        log_det_ratio = np.log1p(self.eigenvalues / (prior_precision * noise**2)).sum()
        return self.log_likelihood(noise) - 0.5 * float(log_det_ratio + prior_precision * self.squared_norm)

    def maximise(self, prior_precision: float | None, noise: float | None) -> tuple[float, float]:
        """`(δ, σ)` of largest marginal likelihood; what is not None stays as it is."""
        if noise is None and prior_precision is None:

            def best_noise(ratio: float) -> float:
                return math.sqrt(max((2 * self.loss + ratio * self.squared_norm) / self.targets, LOWEST))

            def of_ratio(ratio: float) -> float:
                sigma = best_noise(ratio)
                return self.log_marginal_likelihood(ratio / sigma**2, sigma)

            ratio = _maximise(of_ratio, "the product of prior precision and noise variance")
            return ratio / best_noise(ratio) ** 2, best_noise(ratio)
        if noise is None:
            fixed = float(prior_precision or 0)
            variance = _maximise(lambda v: self.log_marginal_likelihood(fixed, math.sqrt(v)), "the noise variance")
            return fixed, math.sqrt(variance)
        if prior_precision is None:
            return _maximise(lambda d: self.log_marginal_likelihood(d, noise), "the prior precision"), noise
        return prior_precision, noise


def _maximise(function: Callable[[float], float], what: str) -> float:
    """Largest value of a function of a positive number: a grid in log space, then Brent's method around its best."""
    low, high = math.log(LOWEST), math.log(HIGHEST)
    grid = np.linspace(low, high, PER_DECADE * round((high - low) / math.log(10)) + 1)
    best = int(np.argmax([function(math.exp(t)) for t in grid]))
    if best in (0, len(grid) - 1):
        warnings.warn(
            f"the marginal likelihood has no maximum in {what} between {LOWEST:g} and {HIGHEST:g} (best at "
            f"{math.exp(grid[best]):g}): the data do not determine it; give prior_precision= (and noise=) yourself",
            stacklevel=4,
        )
        return math.exp(grid[best])
    bounds = (grid[best - 1], grid[best + 1])
    settings: Any = {"bounds": bounds, "method": "bounded", "options": {"xatol": 1e-9}}
    found: Any = minimize_scalar(lambda t: -function(math.exp(t)), **settings)
    return math.exp(float(found.x))
