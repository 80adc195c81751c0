"""The positive numbers that minimise a function, searched for over their logarithms: they never become negative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

from propagauss.predictive.calibration.report import BOUNDS


def minimise(objective: Callable[[float], float], start: float, bounds: tuple[float, float] = BOUNDS) -> float:
    """The positive number that minimises `objective`; `start` if no other is better.

    A coarse grid over the logarithm first (two points per decade), so that a second minimum cannot trap the search.
    """
    low, high = math.log(bounds[0]), math.log(bounds[1])
    grid = np.linspace(low, high, 1 + round(2 * (high - low) / math.log(10)))
    values = np.nan_to_num([objective(math.exp(t)) for t in grid], nan=math.inf)
    at = int(values.argmin())
    bracket = (grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)])
    settings: Any = {"bounds": bracket, "method": "bounded", "options": {"xatol": 1e-6}}
    fine: Any = minimize_scalar(lambda t: objective(math.exp(t)), **settings)
    value, best = min((float(fine.fun), float(fine.x)), (float(values[at]), float(grid[at])))
    return math.exp(best) if value < objective(start) - 1e-10 else start


def minimise_together(
    densities: Callable[[Tensor], list[Tensor]], starts: list[Tensor], bounds: list[tuple[float, float]], count: int
) -> Tensor:
    """The positive numbers of least NLPD of `count` targets, by L-BFGS over logarithms, from the best of the starts."""
    form = starts[0].shape
    known: dict[bytes, tuple[float, np.ndarray]] = {}  # the search begins where the starts were compared

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        if theta.tobytes() not in known:
            leaf = torch.tensor(theta, requires_grad=True)
            with torch.enable_grad():
                sums = [each.sum() for each in densities(leaf.exp().reshape(form))]
                value = -torch.stack(sums).sum() / count
            (gradient,) = torch.autograd.grad(value, leaf)
            known[theta.tobytes()] = value.item(), gradient.numpy()
        value, gradient = known[theta.tobytes()]
        return value, gradient.copy()

    logs = [np.clip(start.log().reshape(-1).numpy(), *np.transpose(bounds)) for start in starts]
    values = [np.nan_to_num(objective(theta)[0], nan=math.inf) for theta in logs]
    first = logs[int(np.argmin(values))]
    if not math.isfinite(min(values)):  # there is nothing to follow
        return torch.from_numpy(first).exp().reshape(form)
    settings: Any = {"jac": True, "bounds": bounds, "method": "L-BFGS-B", "options": {"ftol": 1e-13, "gtol": 1e-8}}
    found: Any = minimize(objective, first, **settings)
    return torch.from_numpy(found.x).exp().reshape(form)
