"""First two moments of `g(x)`, `x ~ N(m, v)`: closed forms, and Gauss-Hermite quadrature for everything else.

Each function returns `E[g(x)]`, `Var[g(x)]` and `E[g'(x)]`. At zero variance they reduce to `g(m)`, 0, `g'(m)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Moments = Callable[..., tuple[Tensor, Tensor, Tensor]]


def quadrature(
    g: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, nodes: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`E[f] = Σ_k w_k f(m + √v z_k)`; `E[g'] = E[z g] / √v` (Stein). Good for smooth `g`, some 1e-2 at kinks.

    Below a floor, where the nodes would collapse onto the mean, moments are extrapolated linearly in `v`.
    """
    lift = (slice(None), *[None] * m.dim())
    z, w = nodes[lift], weights[lift]
    floor = torch.finfo(m.dtype).eps * (1 + m.detach().square())
    wide = v.maximum(floor)
    ratio, s = v / wide, wide.sqrt()
    values = g(m + s * z)  # [K, *m.shape]
    centre = g(m)
    mean = (w * values).sum(0)
    deviation = values - mean
    variance = (w * deviation.square()).sum(0)
    slope = (w * z * deviation).sum(0) / s
    return centre + ratio * (mean - centre), ratio * variance, slope


def relu(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`E = m Φ(α) + s φ(α)`, `Var / v = Φ + α² Φ(α) Φ(-α) + α φ (1 - 2Φ) - φ²`, `α = m/s`.

    The variance is written so that no large terms cancel when the mean is far from the kink.
    """
    s = _root(v)
    alpha = (m / s).clamp(-1e3, 1e3)  # far beyond where all terms are 0 or 1; squares must not overflow
    cdf, tail, pdf = torch.special.ndtr(alpha), torch.special.ndtr(-alpha), _pdf(alpha)
    ratio = cdf + alpha * alpha * cdf * tail + alpha * pdf * (tail - cdf) - pdf * pdf
    return m * cdf + s * pdf, v * ratio.clamp(min=0), cdf


def leaky_relu(m: Tensor, v: Tensor, negative_slope: float = 0.01) -> tuple[Tensor, Tensor, Tensor]:
    """`g(x) = a x + (1 - a) relu(x)`, with `Cov(x, relu(x)) = v Φ(m/s)`."""
    mean, variance, cdf = relu(m, v)
    a, b = negative_slope, 1 - negative_slope
    return a * m + b * mean, a * a * v + b * b * variance + 2 * a * b * v * cdf, a + b * cdf


def clip(m: Tensor, v: Tensor, min_val: float = -1, max_val: float = 1) -> tuple[Tensor, Tensor, Tensor]:
    """`g = l + r(x - l) - r(x - u)`, `r` the ReLU: `Var = Var[r(x - l)] - Var[r(x - u)] - 2 E[r(x - u)] E[u - g]`.

    `E[u - g] = E[r(u - x)] - E[r(l - x)]`: every term is small where it should be, so that nothing large cancels.
    """
    low, low_variance, low_cdf = relu(m - min_val, v)
    high, high_variance, high_cdf = relu(m - max_val, v)
    short = relu(max_val - m, v)[0] - relu(min_val - m, v)[0]
    variance = (low_variance - high_variance - 2 * high * short).clamp(min=0)
    return torch.where(m > max_val, max_val - short, min_val + low - high), variance, low_cdf - high_cdf


def absolute(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Folded normal: `|x| = 2 relu(x) - x`, with `Cov(x, relu(x)) = v Φ(m/s)`."""
    mean, variance, cdf = relu(m, v)
    return 2 * mean - m, (4 * variance + v - 4 * v * cdf).clamp(min=0), 2 * cdf - 1


def exp(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normal: `E = exp(m + v/2)`, `Var = E² (exp(v) - 1)`."""
    mean = torch.exp(m + v / 2)
    return mean, mean * mean * torch.expm1(v), mean


def sin(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`E = exp(-v/2) sin m`, `Var = (1 - exp(-v)) (1 + exp(-v) cos 2m) / 2`."""
    shrink = torch.exp(-v / 2)
    variance = 0.5 * -torch.expm1(-v) * (1 + torch.exp(-v) * torch.cos(2 * m))
    return shrink * torch.sin(m), variance, shrink * torch.cos(m)


def cos(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return sin(m + math.pi / 2, v)


def square(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`E = m² + v`, `Var = 2 v² + 4 m² v`."""
    return m * m + v, 2 * v * v + 4 * m * m * v, 2 * m


MOMENTS: dict[Any, Moments] = {
    aten.relu.default: relu,
    aten.leaky_relu.default: leaky_relu,
    aten.hardtanh.default: clip,
    aten.relu6.default: lambda m, v: clip(m, v, 0, 6),
    aten.abs.default: absolute,
    aten.exp.default: exp,
    aten.sin.default: sin,
    aten.cos.default: cos,
    aten.square.default: square,
}


def _root(v: Tensor) -> Tensor:
    """`√v`, kept off zero so that ratios and gradients stay finite."""
    return v.clamp(min=torch.finfo(v.dtype).tiny ** 0.5).sqrt()


def _pdf(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
