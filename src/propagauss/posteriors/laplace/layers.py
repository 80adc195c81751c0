"""A prior precision for each layer, by the Laplace marginal likelihood.

    log Z(δ, σ) = log p(y | θ, σ) - ½ log det(I + D⁻¹ H / σ²) - ½ Σ_l δ_l ‖θ_l‖²,    D the δ of each parameter's layer

with `log p` as in evidence.py. With `ρ_l = δ_l σ²` the determinant does not depend on `σ`, and for given `ρ` the best
noise is `σ² = (2 loss + Σ_l ρ_l ‖θ_l‖²) / n`: what is left is a search over the logarithms of `ρ`, by their gradient.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from propagauss.posteriors.laplace.evidence import HIGHEST, LOWEST

Prior = float | Mapping[str, float]  # one prior precision, or one by name of the parameter
STARTS = (1.0, 1e-3, 1e3)  # times the best common precision: a marginal likelihood may have several maxima


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by the module that holds them: a weight and its bias are one layer."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] or "(model)", []).append(name)
    return found


def of_name(prior_precision: Prior, name: str) -> float:
    return prior_precision[name] if isinstance(prior_precision, Mapping) else prior_precision


@dataclass(frozen=True)
class LayeredEvidence:
    """What the marginal likelihood depends on; `targets` (`n`) is 0 for a likelihood without noise."""

    log_det: Callable[[Tensor], Tensor]  # ρ [L] -> log det(I + H / ρ)
    squared_norms: Tensor  # [L], ‖θ_l‖²
    loss: float
    targets: int = 0

    def log_marginal_likelihood(self, precisions: Tensor, noise: float = 1.0) -> float:
        """`log Z(δ, σ)`, see the top of this file."""
        return self._log_z(precisions * noise**2, torch.tensor(noise**2, dtype=torch.float64)).item()

    def maximise(self, common: float, noise: float | None, fixed: bool) -> tuple[Tensor, float]:
        """`(δ [L], σ)` of largest marginal likelihood, from a common `δ` and its `σ`, which stays if it is `fixed`."""
        start = math.log(common * (noise or 1.0) ** 2)
        constant = torch.tensor((noise or 1.0) ** 2, dtype=torch.float64)

        def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
            leaf = torch.tensor(theta, requires_grad=True)
            with torch.enable_grad():
                value = -self._log_z(leaf.exp(), constant if fixed else self._best_variance(leaf.exp()))
            (gradient,) = torch.autograd.grad(value, leaf)
            return value.item(), gradient.numpy()

        bounds = [(math.log(LOWEST), math.log(HIGHEST))] * len(self.squared_norms)
        settings: Any = {"jac": True, "bounds": bounds, "method": "L-BFGS-B", "options": {"ftol": 1e-14, "gtol": 1e-7}}
        runs: list[Any] = [
            minimize(objective, np.clip(np.full(len(bounds), start + math.log(s)), *bounds[0]), **settings)
            for s in STARTS
        ]
        ratios = torch.from_numpy(min(runs, key=lambda run: float(run.fun)).x).exp()
        variance = constant if fixed else self._best_variance(ratios)
        return ratios / variance, math.sqrt(variance.item())

    def _best_variance(self, ratios: Tensor) -> Tensor:
        return ((2 * self.loss + (ratios * self.squared_norms).sum()) / max(self.targets, 1)).clamp(min=LOWEST)

    def _log_z(self, ratios: Tensor, variance: Tensor) -> Tensor:
        log_p = -self.loss / variance - 0.5 * self.targets * (2 * math.pi * variance).log()
        return log_p - 0.5 * (self.log_det(ratios) + (ratios * self.squared_norms).sum() / variance)


def warn_of_bounds(precisions: Mapping[str, float]) -> None:
    """Say which layers the data say nothing about."""
    ends = [layer for layer, value in precisions.items() if not 1e3 * LOWEST < value < 1e-3 * HIGHEST]
    if ends:
        warnings.warn(
            f"the marginal likelihood has no maximum in the prior precision of {', '.join(ends)}: the data do not "
            "determine it; choose fewer parameters=, or use per_layer=False",
            stacklevel=3,
        )


def separable_log_det(eigenvalues: Mapping[str, Tensor], layers: Mapping[str, list[str]]) -> Callable[[Tensor], Tensor]:
    """`Σ_l Σ_i log(1 + h_li / ρ_l)`, if layers are independent of each other; eigenvalues by name of the parameter."""
    grouped = [torch.cat([eigenvalues[n].flatten().cpu() for n in names]) for names in layers.values()]

    def log_det(ratios: Tensor) -> Tensor:
        return torch.stack([(h / r).log1p().sum() for h, r in zip(grouped, ratios, strict=True)]).sum()

    return log_det
