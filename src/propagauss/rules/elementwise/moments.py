"""First two moments of `g(x)`, `x ~ N(m, v)`, in closed form.

`quadrature/` has rules for smooth activations and for functions with one kink, and panels for everything else.

Each function returns `E[g(x)]`, `Var[g(x)]` and `E[g'(x)]`. At zero variance they reduce to `g(m)`, 0, `g'(m)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from propagauss.rules.elementwise.pieces import Pieces, split
from propagauss.rules.elementwise.piecewise import PIECES
from propagauss.rules.elementwise.thresholds import clamp, hardshrink, hardsigmoid, hardswish, softshrink, threshold

aten = torch.ops.aten
Moments = Callable[..., tuple[Tensor, Tensor, Tensor]]


def relu(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`E = m Φ(α) + s φ(α)`, `Var / v = Φ + α² Φ(α) Φ(-α) + α φ (1 - 2Φ) - φ²`, `α = m/s`.

    The variance is written so that no large terms cancel when the mean is far from the kink.
    """
    s = _root(v)
    alpha = (m / s).clamp(-1e3, 1e3)  # far beyond where all terms are 0 or 1; squares must not overflow
    (cdf, tail), pdf = split(alpha), _pdf(alpha)
    ratio = cdf + alpha * alpha * cdf * tail + alpha * pdf * (tail - cdf) - pdf * pdf
    return m * cdf + s * pdf, v * ratio.clamp(min=0), cdf


def leaky_relu(m: Tensor, v: Tensor, negative_slope: float = 0.01) -> tuple[Tensor, Tensor, Tensor]:
    """`g(x) = a x + (1 - a) relu(x)`, with `Cov(x, relu(x)) = v Φ(m/s)`."""
    mean, variance, cdf = relu(m, v)
    a, b = negative_slope, 1 - negative_slope
    return a * m + b * mean, a * a * v + b * b * variance + 2 * a * b * v * cdf, a + b * cdf


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


def of_pieces(
    pieces: Pieces, function: Callable[[Tensor], Tensor], m: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a piecewise polynomial, which is also `function`."""
    mean, variance, slope = pieces.moments(m, v)
    if pieces.jumps:  # pieces do not say which of them a knot belongs to
        mean = torch.where(v > 0, mean, function(m))
    return mean, variance, slope


def _of_op(op: Any) -> Moments:
    """Of an op that is a piecewise polynomial; its settings say which."""
    pieces = cache(PIECES[op])

    def moments(m: Tensor, v: Tensor, *settings: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = pieces(*settings, **named)
        if torch.compiler.is_exporting() and not found.jumps:  # runtimes lack some of these ops in double precision
            return found.moments(m, v)
        return found.moments(m, v, lambda t: op(t, *settings, **named))

    return moments


MOMENTS: dict[Any, Moments] = {op: _of_op(op) for op in PIECES} | {
    aten.relu.default: relu,
    aten.leaky_relu.default: leaky_relu,
    aten.rrelu.default: lambda m, v, lower=1 / 8, upper=1 / 3, *_: leaky_relu(m, v, (lower + upper) / 2),
    aten.abs.default: absolute,
    aten.relu6.default: lambda m, v: clamp(m, v, 0.0, 6.0),
    aten.hardtanh.default: lambda m, v, min_val=-1.0, max_val=1.0: clamp(m, v, min_val, max_val),
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_max.default: lambda m, v, max: clamp(m, v, None, max),
    aten.hardsigmoid.default: hardsigmoid,
    aten.threshold.default: threshold,
    aten.hardshrink.default: hardshrink,
    aten.softshrink.default: softshrink,
    aten.hardswish.default: hardswish,
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
