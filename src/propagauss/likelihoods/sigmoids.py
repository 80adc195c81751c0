"""Links for single logits: `log E[σ(f)]` and `log E[σ(-f)]` for `f ~ N(m, v)`, elementwise.

Pure functions `link(mean, variance)` of tensors of one shape. All are differentiable, work in log space and never
branch on values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Pair = tuple[Tensor, Tensor]  # logarithms of P(y = 1) and of P(y = 0)
SigmoidLink = Callable[[Tensor, Tensor], Pair]

NODES = 32  # of the Gauss-Hermite rule, for variances below 1
STEP, REACH = 0.14, 7.0  # of the trapezoidal rule, for larger ones
DEPTH = 16  # of a continued fraction: twelve digits


def probit(mean: Tensor, variance: Tensor) -> Pair:
    """`σ(m / √(1 + π/8 v))`: within 0.02 of the integral, and too sure or too unsure in the tails of wide latents."""
    logit = mean / (1 + math.pi / 8 * variance).sqrt()
    return F.logsigmoid(logit), F.logsigmoid(-logit)


def quadrature(mean: Tensor, variance: Tensor) -> Pair:
    """The integral `∫ σ(f) N(f; m, v) df`, to about ten digits of the smaller probability, whatever the variance.

    For `m ≤ 0` it is the smaller one. Since `σ(f) = e^f σ(-f)`, it is also `e^(m + v/2) E[σ(-f)]` with
    `f ~ N(m + v, v)`, an expectation of ordinary size if `m + v` is not far above zero.
    """
    v = variance + torch.finfo(mean.dtype).eps  # a little, for a gradient where there is none
    low, stddev = torch.where(mean <= 0, mean, -mean), v.sqrt()
    far = low + v <= 2 * stddev
    centre = torch.where(far, -(low + v), low)
    small = torch.where(far, low + v / 2, 0.0) + log_mean(centre, v)
    large = torch.log1p(-small.exp())
    return torch.where(mean <= 0, small, large), torch.where(mean <= 0, large, small)


def log_mean(mean: Tensor, variance: Tensor) -> Tensor:
    """`log E[σ(f)]` by one of two rules, each with terms that are all positive.

    Narrow: Gauss-Hermite over `f`. Wide: `σ` is the distribution function of a logistic number `u`, so the mean is
    `P(f + u > 0) = ∫ λ(u) Φ((m + u) / √v) du`, and `Φ` is smooth; a trapezoidal rule over `u = π sinh t`.
    """
    points, log_weights = (t.to(mean) for t in _hermite())
    narrow = mean.unsqueeze(-1) + variance.clamp(max=1).sqrt().unsqueeze(-1) * points
    u, log_density = (t.to(mean) for t in _logistic())
    wide = (mean.unsqueeze(-1) + u) / variance.clamp(min=1).sqrt().unsqueeze(-1)
    return torch.where(
        variance < 1,
        torch.logsumexp(F.logsigmoid(narrow) + log_weights, -1),
        torch.logsumexp(log_normal(wide) + log_density, -1),
    )


def log_normal(x: Tensor) -> Tensor:
    """`log Φ(x)`: by the error function, and below -3 by the continued fraction of Laplace.

    torch has it, but exporters to ONNX make NaN of that.
    """
    near = ((1 + (x.clamp(min=-3) / math.sqrt(2)).erf()) / 2).log()
    far = -x.clamp(max=-3)
    ratio = far
    for k in range(DEPTH, 0, -1):
        ratio = far + k / ratio
    return torch.where(x > -3, near, -far.square() / 2 - ratio.log() - math.log(2 * math.pi) / 2)


SIGMOID_LINKS: dict[str, SigmoidLink] = {"probit": probit, "quadrature": quadrature}


@functools.cache
def _hermite() -> Pair:
    """Points and logarithms of weights for a standard normal number."""
    points, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return torch.from_numpy(points), torch.from_numpy(np.log(weights / weights.sum()))


@functools.cache
def _logistic() -> Pair:
    """Points and logarithms of weights for a logistic number, whose density is `σ(u) σ(-u)`."""
    t = torch.arange(-REACH, REACH + STEP / 2, STEP, dtype=torch.float64)
    u = math.pi * t.sinh()
    log_weights = F.logsigmoid(u) + F.logsigmoid(-u) + (math.pi * STEP * t.cosh()).log()
    return u, log_weights - log_weights.logsumexp(0)
