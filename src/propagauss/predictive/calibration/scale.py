"""`fit_scale`: the scale of least NLPD on held-out data, alone or with the likelihood's own numbers (the noise)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from propagauss.errors import InputError
from propagauss.likelihoods.base import Free, Likelihood
from propagauss.predictive.calibration.held_out import cache
from propagauss.predictive.calibration.report import BOUNDS, FitReport
from propagauss.predictive.calibration.search import minimise

T = TypeVar("T", bound=Likelihood)


def fit_scale(
    net: Any, loader: Iterable[Any], likelihood: T, start: float, fit_own: bool = False, progress: bool = True
) -> tuple[FitReport, T]:
    """`argmin_s mean -log E[p(y | f)]`, `f ~ N(m, s C)`, over the likelihood's own numbers as well if asked.

    Returns what was done, and the likelihood with the numbers that were found.
    """
    cached, points, count, _ = cache(net, loader, likelihood, progress)

    def nlpd(likelihood: Likelihood, scale: Tensor | float) -> Tensor:
        densities = (likelihood.log_predictive(moments.scaled(scale), y) for moments, y in cached)
        return -sum((each.sum() for each in densities), torch.zeros((), dtype=torch.float64)) / count

    if not fit_own:
        for moments, _ in cached:
            likelihood.check(moments)
        at = functools.cache(lambda scale: nlpd(likelihood, scale).item())  # the search looks at both that are reported
        best = minimise(at, start)
        return FitReport("scale", start, best, at(start), at(best), points), likelihood
    free = likelihood.free(cached)
    if free is None:
        raise InputError(f"likelihood='{likelihood.name}' has nothing of its own to fit: only the scale")
    scale, values = _fit_together(lambda scale, values: nlpd(free.replaced(values), scale), free, start)
    fitted = cast(T, free.replaced(values))
    # there may be no predictive before: zero noise and zero variance
    before = nlpd(likelihood, start).nan_to_num(math.inf, posinf=math.inf, neginf=math.inf).item()
    after = nlpd(fitted, scale).item()
    return FitReport("scale", start, scale, before, after, points, {free.name: values}), fitted


def _fit_together(nlpd: Callable[[Tensor, Tensor], Tensor], free: Free, start: float) -> tuple[float, Tensor]:
    """The scale and the numbers that are free with it, by L-BFGS over their logarithms from several starts."""
    bounds = [(math.log(BOUNDS[0]), math.log(BOUNDS[1])), *free.bounds]
    form = free.guess(start).shape

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(theta, requires_grad=True)
        with torch.enable_grad():
            value = nlpd(leaf[0].exp(), leaf[1:].exp().reshape(form))
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.item(), gradient.numpy()

    def initial(scale: float) -> np.ndarray:
        return np.concatenate([[math.log(scale)], free.guess(scale).log().reshape(-1).numpy()])

    # the given scale comes first and wins ties, so that it stays where the data say nothing about it
    others = sorted(map(initial, np.logspace(-6, 6, 25)), key=lambda theta: objective(theta)[0])[:3]
    runs = [minimize(objective, t, jac=True, bounds=bounds, method="L-BFGS-B") for t in (initial(start), *others)]
    best = min(runs, key=lambda run: round(float(run.fun), 10))
    return math.exp(best.x[0]), torch.from_numpy(best.x)[1:].exp().reshape(form)
