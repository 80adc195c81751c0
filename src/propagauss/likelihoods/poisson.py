"""Counts: `p(y | f) = Poisson(y; e^f)`, `f` the logarithm of the rate. Also the example of how to add a likelihood."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import check_targets
from propagauss.likelihoods.base import Decomposition, Likelihood, Moments, Root, diagonal_root

NODES = 64


@dataclass(frozen=True)
class PoissonLikelihood(Likelihood):
    """`p(y | f) = Poisson(y; e^f)`; the network gives one log rate for each count."""

    name: ClassVar[str] = "poisson"

    def matched(self, output: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
        f, y = super().matched(output, y, where)
        return f, _counts(y, f"{where}: ")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """`Σ e^f - y f + log y!`"""
        return (f.exp() - y * f + torch.lgamma(y.double() + 1)).sum()

    def root(self, f: Tensor) -> Root:
        """The Hessian is `diag(e^f)`, whatever the counts."""
        return diagonal_root(f.exp())

    def predictive(self, latent: Gaussian) -> PoissonLogNormal:
        return PoissonLogNormal(latent.mean, latent.variance)

    def log_predictive(self, moments: Moments, y: Tensor) -> Tensor:
        return log_density(moments.mean, moments.covariance, y)

    def decompose(self, latent: Gaussian) -> Decomposition:
        """`Var[y] = Var[e^f] + E[e^f]`"""
        rate = (latent.mean + latent.variance / 2).exp()
        return Decomposition(rate.square() * latent.variance.expm1(), rate)

    def targets(self, y: Tensor, shape: torch.Size) -> Tensor:
        return _counts(check_targets(y, shape))

    def exported(self, latent: Gaussian) -> dict[str, Tensor]:
        """The log rate, and the rate: `rate` is the expected count, and `rate + rate_variance` the count's variance."""
        epistemic, rate = self.decompose(latent)
        return {"mean": latent.mean, "variance": latent.variance, "rate": rate, "rate_variance": epistemic}


class PoissonLogNormal(Distribution):
    """Counts whose rate is uncertain: `y ~ Poisson(e^f)`, `f ~ N(m, v)`. Mean and variance are exact."""

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "log_rate": constraints.real,
        "log_rate_variance": constraints.nonnegative,
    }
    support = constraints.nonnegative_integer  # pyright: ignore[reportAssignmentType] (as torch does)

    def __init__(self, log_rate: Tensor, log_rate_variance: Tensor, validate_args: bool | None = None):
        self.log_rate, self.log_rate_variance = log_rate, log_rate_variance
        super().__init__(log_rate.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        return (self.log_rate + self.log_rate_variance / 2).exp()

    @property
    def variance(self) -> Tensor:
        return self.mean + self.mean.square() * self.log_rate_variance.expm1()

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return log_density(self.log_rate, self.log_rate_variance, value)

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            f = self.log_rate + self.log_rate_variance.sqrt() * torch.randn(shape).to(self.log_rate)
            return torch.poisson(f.exp())


def log_density(m: Tensor, v: Tensor, y: Tensor) -> Tensor:
    """`log ∫ Poisson(y; e^(m + √v z)) N(z; 0, 1) dz`, all of one shape, by quadrature around the integrand's mode.

    With `w = v e^f` the mode `f` solves `w + log w = log v + m + v y`. Errors are below 1e-7 for `v` up to 4, 1e-5 up
    to 10 and 0.01 up to 100: there the rate is uncertain by a factor of e^10 and the integrand has a cliff.
    """
    v, y = v + torch.finfo(v.dtype).eps, y.to(m)  # a little variance, for a gradient where there is none
    stddev = v.sqrt()
    with torch.no_grad():  # the integral does not depend on where its nodes are
        right = v.log() + m + v * y
        w = torch.where(right > 1, right - right.clamp(min=1).log(), right.clamp(max=1).exp())
        for _ in range(6):  # Newton
            w = w * (1 + right - w.log()) / (1 + w)
        centre, width = stddev * y - w / stddev, (2 / (1 + w)).sqrt()
        nodes, log_weights = (t.to(m) for t in _gauss_hermite())
        z = centre.unsqueeze(-1) + width.unsqueeze(-1) * nodes
    y = y.unsqueeze(-1)
    f = m.unsqueeze(-1) + stddev.unsqueeze(-1) * z
    log_integrand = y * f - f.exp() - torch.lgamma(y + 1) - z.square() / 2
    return torch.logsumexp(log_integrand + log_weights, -1) + (width / math.sqrt(2 * math.pi)).log()


@functools.cache
def _gauss_hermite() -> tuple[Tensor, Tensor]:
    """Nodes `x` and `log(weight e^(x²))`, for an integral without a weight function."""
    nodes, weights = np.polynomial.hermite.hermgauss(NODES)
    return torch.from_numpy(nodes), torch.from_numpy(np.log(weights) + nodes**2)


def _counts(y: Tensor, where: str = "") -> Tensor:
    if not (y.isfinite() & (y >= 0) & (y == y.floor())).all():
        raise InputError(f"{where}likelihood='poisson' needs counts: whole numbers, none negative")
    return y
