"""Waiting times: `p(y | f) = e^f exp(-e^f y)`, `f` the logarithm of the rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import check_targets
from propagauss.likelihoods.base import Decomposition, Likelihood, Moments, Root, diagonal_root
from propagauss.likelihoods.poisson import log_density


@dataclass(frozen=True)
class ExponentialLikelihood(Likelihood):
    """`p(y | f) = e^f exp(-e^f y)`; the network gives one log rate for each waiting time, whose mean is `e^-f`."""

    name: ClassVar[str] = "exponential"

    def matched(self, output: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
        f, y = super().matched(output, y, where)
        return f, _times(y, f"{where}: ")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """`Σ y e^f - f`"""
        return (y * f.exp() - f).sum()

    def root(self, f: Tensor) -> Root:
        """The Hessian `diag(y e^f)` depends on the times; its mean over them, the Fisher matrix, is the identity."""
        return diagonal_root(torch.ones_like(f))

    def predictive(self, latent: Gaussian) -> ExponentialLogNormal:
        return ExponentialLogNormal(latent.mean, latent.variance)

    def log_predictive(self, moments: Moments, y: Tensor) -> Tensor:
        return log_waiting(moments.mean, moments.covariance, y)

    def decompose(self, latent: Gaussian) -> Decomposition:
        """`Var[y] = Var[e^-f] + E[e^-2f]`"""
        square = (2 * (latent.variance - latent.mean)).exp()
        return Decomposition(-square * (-latent.variance).expm1(), square)

    def targets(self, y: Tensor, shape: torch.Size) -> Tensor:
        return _times(check_targets(y, shape))

    def exported(self, latent: Gaussian) -> dict[str, Tensor]:
        """The log rate; the expected waiting `time`, and the standard deviation of a new one."""
        time, parts = (latent.variance / 2 - latent.mean).exp(), self.decompose(latent)
        stddev = (parts.epistemic + parts.aleatoric).sqrt()
        return {"mean": latent.mean, "variance": latent.variance, "time": time, "time_stddev": stddev}


class ExponentialLogNormal(Distribution):
    """Waiting times whose rate is uncertain: `y ~ Exponential(e^f)`, `f ~ N(m, v)`. Mean and variance are exact."""

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "log_rate": constraints.real,
        "log_rate_variance": constraints.nonnegative,
    }
    support = constraints.nonnegative  # pyright: ignore[reportAssignmentType] (as torch does)

    def __init__(self, log_rate: Tensor, log_rate_variance: Tensor, validate_args: bool | None = None):
        self.log_rate, self.log_rate_variance = log_rate, log_rate_variance
        super().__init__(log_rate.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """`E[e^-f]`"""
        return (self.log_rate_variance / 2 - self.log_rate).exp()

    @property
    def variance(self) -> Tensor:
        """`2 E[e^-2f] - E[e^-f]²`"""
        return self.mean.square() * (1 + 2 * self.log_rate_variance.expm1())

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return log_waiting(self.log_rate, self.log_rate_variance, value)

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            f = self.log_rate + self.log_rate_variance.sqrt() * torch.randn(shape).to(self.log_rate)
            return torch.empty_like(f).exponential_() * (-f).exp()


def log_waiting(m: Tensor, v: Tensor, y: Tensor) -> Tensor:
    """`log ∫ e^f exp(-e^f y) N(f; m, v) df`.

    The integrand is that of one event in the time `y`, `Poisson(1; y e^f) / y`, and the rate per `y` is uncertain as
    `N(m + log y, v)`: the integral of counts serves, with its errors. At `y = 0` it is `E[e^f]`.
    """
    y = y.to(m)
    waited = torch.where(y > 0, y, 1.0)
    log_y = waited.log()
    return torch.where(y > 0, log_density(m + log_y, v, torch.ones_like(m)) - log_y, m + v / 2)


def _times(y: Tensor, where: str = "") -> Tensor:
    if not (y.isfinite() & (y >= 0)).all():
        raise InputError(f"{where}likelihood='exponential' needs waiting times: finite numbers, none negative")
    return y
