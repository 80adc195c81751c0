"""First two moments of the exponential linear units, ELU, CELU and SELU, in closed form.

    g(x) = B x for x > 0,    A (exp(c x) - 1) for x <= 0,        x ~ N(m, v), s = √v, a = m/s, h = c s

Exponentials against a normal density are normal densities elsewhere: with the Mills ratio `R(u) = Φ(-u)/φ(u)`,

    M_j = ∫_{x < 0} exp(j c x) φ = φ(a) R(a + j h),            M_0 = Φ(-a)

and every moment is a sum of `M_0`, `M_1`, `M_2` and of the two moments of the straight line.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from propagauss.rules.elementwise.pieces import FAR, mills, wide

LARGE = 600.0  # an exponential of it is a number, also where it is not used


def elu(
    m: Tensor, v: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`E[g]`, `Var[g]` and `E[g']`, `A = alpha scale`, `B = scale`, `c = input_scale`.

    In double precision and measured from `g(m)`, which is the median of `g`, so that the square of the mean deviation
    is no larger than the variance. Second differences of Mills ratios remain, whose digits are lost with small `h`.
    Around zero a narrow function is the same on all scales, so that below a floor `h` is replaced by the floor, at the
    same `a`, and deviations are scaled back; away from zero only the factor `exp(c m)` is not the same.
    """
    dtype, m, v = m.dtype, wide(m), wide(v)
    limits, c = torch.finfo(v.dtype), input_scale
    s = v.clamp(min=limits.tiny**0.5).sqrt()
    floored = s.clamp(min=limits.eps ** (1 / 3) / abs(c))
    a = (m / s).clamp(-FAR, FAR)
    at = a * floored
    h, exponent, line = _times(c, floored), _times(c, at), _times(scale, floored)
    left = a <= 0
    above, density, masses = _masses(a, h, exponent, left)
    # deviations from g(m): A exp(c x) - base on the left of zero, B s z + gap on its right
    first, second = (_times(alpha * scale, each) for each in masses[1:])
    value = _unit(at, alpha, scale, c)
    base, gap = value + alpha * scale, _times(scale, at) - value
    same = torch.exp(torch.where(left, _times(c, m) - exponent, 0.0))
    lower = torch.addcmul(first, base, masses[0], value=-1)
    upper = torch.addcmul(line * density, gap, above)
    shift = torch.addcmul(upper, same, lower)
    lower_square = _times(alpha * scale, torch.addcmul(second, base, masses[1], value=-1)) - base * lower
    upper_square = line * torch.addcmul(gap * density, line, torch.addcmul(above, a, density, value=-1)) + gap * upper
    variance = torch.addcmul(upper_square, same.square(), lower_square) - shift.square()
    mean = torch.addcmul(_unit(m, alpha, scale, c), s / floored, shift)
    slope = torch.addcmul(_times(scale, above), same, first, value=c)
    return mean.to(dtype), (variance.clamp(min=0) * (v / floored.square())).to(dtype), slope.to(dtype)


def _times(factor: float, t: Tensor) -> Tensor:
    return t if factor == 1 else factor * t


def _unit(x: Tensor, alpha: float, scale: float, c: float) -> Tensor:
    """`g(x)`; in ops of its own in exported graphs, as their runtimes lack it in double precision."""
    if not torch.compiler.is_exporting():
        return torch.ops.aten.elu(x, alpha, scale, c)
    bent = (alpha * scale) * torch.expm1((c * x).clamp(max=LARGE))
    return torch.where(x > 0, scale * x, bent)


def celu(m: Tensor, v: Tensor, alpha: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    return elu(m, v, alpha, 1.0, 1 / alpha)


def selu(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return elu(m, v, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _masses(a: Tensor, h: Tensor, exponent: Tensor, left: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """`Φ(a)`, `φ(a)` and the `M_j`; neither factor of a product is too large or too small on its own."""
    density = torch.exp(a * a * -0.5) * (1 / math.sqrt(2 * math.pi))
    at = a + h
    points = torch.stack([a, at, at + h])
    tails = density * mills(points.abs())
    tail, points, tails = tails[0], points[1:], tails[1:]
    most = 1 - tail
    whole = torch.stack([torch.addcmul(exponent, h, h, value=0.5), 2 * h * at]).clamp(max=LARGE).exp()
    rest = torch.where(points > 0, tails, whole - tails).unbind(0)
    return torch.where(left, tail, most), density, (torch.where(left, most, tail), *rest)
