"""Ways to predict a real number from one network and posterior, how well they did, and which are the best.

What is stored of the test points are sums (`moments`), from which paired tests over all folds can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from experiments.methods.classify import Remembered
from experiments.uci.posteriors import Fitted
from propagauss.demo.data import Split
from propagauss.demo.methods import Sampler, mixture_log_density
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.predictive.baselines import MAP
from propagauss.predictive.calibration import BOUNDS, minimise
from propagauss.predictive.regressor import Regressor

ROWS = 256  # inputs that are predicted at once
EQUAL = 1e-6  # the same mean computed in two ways differs by rounding only, which a test would call significant
STDDEV = "spread"  # its name in stored results
SCALE_DRAWS, SCALE_POINTS = 200, 1000  # for the scale of sampling, which needs all draws at every trial


@dataclass(frozen=True)
class Score:
    """One way of predicting on the test part; `losses` (-log p) and `errors` (squared) of each point."""

    name: str
    losses: Tensor
    errors: Tensor
    noise: float
    scale: float | None = None
    stddev: float | None = None  # median standard deviation of the latent, at scale 1

    @property
    def at_bound(self) -> bool:
        return self.scale is not None and any(abs(math.log(self.scale / bound)) < 1e-3 for bound in BOUNDS)

    def as_dict(self) -> dict[str, Any]:
        return {
            "nlpd": self.losses.mean().item(),
            "rmse": self.errors.mean().sqrt().item(),
            "noise": self.noise,
            "scale": self.scale,
            "at_bound": self.at_bound,
            STDDEV: self.stddev,
            "worst": self.losses.max().item(),
        }


def map_scores(fitted: Fitted, split: Split) -> list[Score]:
    """The network alone, its noise fitted on the validation part."""
    regressor = Regressor(MAP(fitted.model), fitted.noise)
    regressor.fit_scale(_batches(split.validation), fit_noise=True, progress=False)
    return [_normal("MAP", regressor, split, None)]


@torch.no_grad()
def sampling_scores(name: str, fitted: Fitted, split: Split, samples: int, seed: int) -> list[Score]:
    """The mixture over draws; its mean and variance as one Gaussian; the mixture with its scale fitted."""
    x, y = split.test
    scale = _sampler_scale(fitted, split, min(samples, SCALE_DRAWS), seed)
    sampler = Sampler(fitted.model, fitted.posterior, samples, seed)
    latents = sampled(sampler, x)
    variance = latents.var(0) + fitted.noise**2
    normal = 0.5 * ((y - latents.mean(0)).square() / variance + variance.log() + math.log(2 * math.pi))
    stddev = latents.std(0).median().item()
    mixture = -mixture_log_density(latents, y.double(), fitted.noise)
    scores = [
        _score(f"{name} sampling", mixture, latents.mean(0) - y, fitted.noise, 1.0, stddev),
        _score(f"{name} sampling, one Gaussian", normal, latents.mean(0) - y, fitted.noise, 1.0, stddev),
    ]
    latents = sampled(sampler.rescaled(scale), x)
    mixture = -mixture_log_density(latents, y.double(), fitted.noise)
    return [
        *scores,
        _score(f"{name} sampling, scale fitted", mixture, latents.mean(0) - y, fitted.noise, scale, stddev),
    ]


def _sampler_scale(fitted: Fitted, split: Split, samples: int, seed: int) -> float:
    x, y = (part[:SCALE_POINTS] for part in split.validation)
    sampler = Sampler(fitted.model, fitted.posterior, samples, seed)

    def nlpd(scale: float) -> float:
        return -mixture_log_density(sampled(sampler.rescaled(scale), x), y.double(), fitted.noise).mean().item()

    return minimise(nlpd, 1.0)


def sampled(sampler: Sampler, x: Tensor) -> Tensor:
    """`[samples, n, 1]`, some inputs at a time; in double precision, as densities of far values need it."""
    return torch.cat([sampler.latents(part).double() for part in x.split(ROWS)], 1)


def glm_scores(name: str, fitted: Fitted, split: Split) -> list[Score]:
    """Linearised in the weights: as it is, and with its scale fitted."""
    net = linearise(fitted.model, fitted.posterior, split.test[0][:2])
    return gaussian_scores(f"{name} GLM", net, fitted, split)


def our_scores(name: str, fitted: Fitted, split: Split) -> list[Score]:
    """One pass: with its scale fitted and as it is, and the same with variances only."""
    example = split.test[0][:2]
    net = streamline(fitted.model, fitted.posterior, example, covariance="full")
    as_it_is, scaled = gaussian_scores(f"{name} ours", net, fitted, split)
    del net  # before the next: with a full posterior of many parameters each is large
    net = streamline(fitted.model, fitted.posterior, example, covariance="diagonal")
    variances = gaussian_scores(f"{name} ours, variances only", net, fitted, split)[1]
    return [
        replace(scaled, name=f"{name} ours"),
        replace(as_it_is, name=f"{name} ours, scale 1"),
        replace(variances, name=f"{name} ours, variances only"),
    ]


@torch.no_grad()
def gaussian_scores(name: str, net: Callable[[Tensor], Gaussian], fitted: Fitted, split: Split) -> list[Score]:
    latents, scores = Remembered(net), []
    validation, test = _batches(split.validation), _batches(split.test)
    stddev = torch.cat([latents(x).variance for x, _ in test]).sqrt().median().item()
    for fit in (False, True):
        regressor = Regressor(latents, fitted.noise)
        if fit:
            regressor.fit_scale(validation, progress=False)
        scores.append(_normal(name + ", scale fitted" * fit, regressor, split, stddev, test))
    return scores


@torch.no_grad()
def _normal(
    name: str, regressor: Regressor, split: Split, stddev: float | None, test: Sequence[Any] | None = None
) -> Score:
    found = [(regressor(x), y) for x, y in test or _batches(split.test)]
    losses = torch.cat([-p.log_prob(y) for p, y in found])
    errors = torch.cat([p.mean - y for p, y in found])
    return _score(name, losses, errors, float(regressor.noise), None if stddev is None else regressor.scale, stddev)


def _score(
    name: str, losses: Tensor, differences: Tensor, noise: float, scale: float | None, stddev: float | None
) -> Score:
    return Score(name, losses.flatten().double(), differences.flatten().double().square(), noise, scale, stddev)


def _batches(pair: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(ROWS) for part in pair), strict=True))


# -- paired tests


def moments(columns: Sequence[Tensor]) -> dict[str, Any]:
    """Number, means and covariances of values that belong to the same points: `[M]` and `[M, M]`."""
    values = torch.stack(list(columns)).numpy()
    return {"n": values.shape[1], "mean": values.mean(1).tolist(), "covariance": np.cov(values, bias=True).tolist()}


def pooled(folds: Sequence[dict[str, Any]]) -> tuple[int, np.ndarray, np.ndarray]:
    """Number, means and covariances over all points of several folds."""
    sizes = np.array([f["n"] for f in folds], dtype=float)
    means = np.array([f["mean"] for f in folds])  # [F, M]
    mean = sizes @ means / sizes.sum()
    second = sum(n * (np.array(f["covariance"]) + np.outer(m, m)) for n, m, f in zip(sizes, means, folds, strict=True))
    return int(sizes.sum()), mean, second / sizes.sum() - np.outer(mean, mean)


def p_value(n: int, difference: float, variance: float) -> float:
    """Of a paired t-test of `n` differences with this mean and (biased) variance."""
    if abs(difference) < EQUAL:
        return 1.0
    if variance <= 0:
        return 0.0
    return float(2 * student.sf(abs(difference) / math.sqrt(variance / (n - 1)), n - 1))


def bold(n: int, mean: np.ndarray, covariance: np.ndarray, level: float = 0.05) -> list[bool]:
    """Which methods have the least mean, or are not told apart from the one that has."""
    best = int(mean.argmin())
    variances = covariance.diagonal() + covariance[best, best] - 2 * covariance[best]
    return [i == best or p_value(n, mean[i] - mean[best], v) >= level for i, v in enumerate(variances)]
