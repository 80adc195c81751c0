"""First two moments of thresholds, shrinkages and hard swish, in closed form.

These are sums of powers of what lies past a knot. With `x ~ N(m, v)`, `s = √v`, the knot at a distance `u` from the
mean and `w` how far `x` is past it, seen from the mean (0 if it is not), `q = Φ(-u/s)` and `p = φ(u/s)`:

    K_1 = E[w] = s p - u q        K_2 = E[w²] = v q - u K_1        K_(i+1) = i v K_(i-1) - u K_i

All of them vanish with the probability of being past the knot, so that nothing large cancels where the variance is
small. In double precision, as the sums are small differences where it is large.

Written out, each takes a third of the ops of a sum over pieces.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from propagauss.rules.elementwise.pieces import normal_tail, wide

aten = torch.ops.aten
Moments = tuple[Tensor, Tensor, Tensor]
NEVER = 40.0  # standard deviations: density and tail are zero there, also in double precision


def threshold(m: Tensor, v: Tensor, threshold: float, value: float) -> Moments:
    """`x` where `x > θ`, else `c`. With `J = θ - c`, `o = 1` if `m > θ` else 0, and `P = o + (1 - 2 o) q`, the
    probability of `x > θ`:

        E[g] = g(m) + K_1 + J (P - o)        E[g'] = P + J p/s        R = E[relu(x - θ)] = relu(m - θ) + K_1
        Var[g] = v P - K_1 (K_1 + u) + J (1 - P) (J P + 2 R)
    """
    return _narrow(m.dtype, *_threshold(wide(m), wide(v), threshold, value))


def hardshrink(m: Tensor, v: Tensor, lambd: float = 0.5) -> Moments:
    """`x` where `|x| > λ`, else 0: the difference of two thresholds at `λ`, of `x` and of `-x`."""
    if lambd < 0:  # all of the line, but for the point zero
        return m, v, torch.ones_like(m)
    return _narrow(m.dtype, *_difference(*_threshold(_both(m), wide(v), lambd, 0.0)))


def softshrink(m: Tensor, v: Tensor, lambd: float = 0.5) -> Moments:
    """`relu(x - λ) - relu(-x - λ)`"""
    return _narrow(m.dtype, *_difference(*_threshold(_both(m) - lambd, wide(v), 0.0, 0.0)))


def hardswish(m: Tensor, v: Tensor) -> Moments:
    """`G = 6 g` is `x (x + 3)` between the knots `k = ±3`, 0 below and `6 x` above. A mean beyond a knot has `c = -1`
    there, else `c = 1`, and `x` past the knot changes `G` by `-(3 w + c w²)`. With `i = 1` between the knots, else 0:

        e_k = 3 K_1 + c K_2        E[G] = G(m) + i v - Σ e_k        E[G'] = G'(m) - Σ ± (2 K_1 + 3 c q)
        Var[G] = v G'(m)² + 2 i v (v + Σ e_k) + Σ e_k (2 G(m) - Σ e_k)
                 - Σ (9 c K_2 + 6 K_3 + c K_4) - 12 (3 e_k + 3 c K_2 + K_3) at k = 3
    """
    dtype, m, v = m.dtype, wide(m), wide(v)
    side, u, _, _, q, first = _past(_both(m) - 3, v)
    second = torch.addcmul(v * q, u, first, value=-1)
    third = torch.addcmul(u * second, v, first, value=-2)  # this one and those below with the opposite sign
    fourth = torch.addcmul(-u * third, v, second, value=-3)
    even = side * second
    lost = torch.sub(even, first, alpha=3)
    inside, ramp, all_lost = side.sum(0) * -0.5, (m + 3).clamp(0, 6), lost.sum(0)
    y, bend, slope = m * ramp, inside * v, torch.addcmul(ramp, inside, m)
    variance = torch.addcmul(slope * slope * v, bend, v - all_lost, value=2)
    variance = torch.addcmul(variance, all_lost, torch.add(all_lost, y, alpha=2), value=-1)
    above = torch.add(third, lost + even, alpha=3)[0]
    knots = torch.add(torch.addcmul(9 * even, side, fourth, value=-1), third, alpha=6).sum(0)
    variance = torch.add(variance + knots, above, alpha=12).clamp(min=0)
    up, down = torch.addcmul(first, side, q, value=-1.5).unbind(0)
    slope = torch.sub(slope, up - down, alpha=2)
    return _narrow(dtype, (y + bend + all_lost) * (1 / 6), variance * (1 / 36), slope * (1 / 6))


class _Past(NamedTuple):
    """What lies past zero, seen from the mean `t`."""

    side: Tensor  # 1 where the mean is positive, else -1
    u: Tensor
    v: Tensor  # kept off zero, so that ratios and gradients stay finite
    scaled: Tensor  # s p
    q: Tensor
    first: Tensor  # K_1


def _past(t: Tensor, v: Tensor) -> _Past:
    floored = v.clamp(min=torch.finfo(v.dtype).tiny ** 0.5)
    s = floored.sqrt()
    side = aten.threshold(t.sign(), 0, -1)  # never 0
    u = side * t  # the absolute value has no slope at zero
    a = (u / s).clamp(max=NEVER)
    scaled, q = torch.exp(a * a * -0.5) * (s * (1 / math.sqrt(2 * math.pi))), normal_tail(a)
    return _Past(side, u, floored, scaled, q, torch.addcmul(scaled, u, q, value=-1))


def _threshold(m: Tensor, v: Tensor, threshold: float, value: float) -> Moments:
    t, jump = m - threshold, threshold - value
    side, u, floored, scaled, q, first = _past(t, v)
    share = v / floored
    q = q * share if jump else q  # without variance, a mean on the knot is on one side of it
    beyond, moved = side.relu(), side * q
    above = beyond - moved
    mean = aten.threshold(m, threshold, value) + first
    variance = torch.addcmul(v * above, first, first + u, value=-1)
    if not jump:
        return mean, variance.clamp(min=0), above
    pull = torch.add(jump * above, t.relu() + first, alpha=2)
    variance = torch.addcmul(variance, moved - (beyond - 1), pull, value=jump)
    slope = torch.addcmul(above, scaled, share / floored, value=jump)
    return torch.sub(mean, moved, alpha=jump), variance.clamp(min=0), slope


def _both(m: Tensor) -> Tensor:
    m = wide(m)
    return torch.stack([m, -m])


def _difference(mean: Tensor, variance: Tensor, slope: Tensor) -> Moments:
    """Of the same function of `x` and of `-x`, of which one is always zero."""
    up, down = mean.unbind(0)
    return up - down, torch.addcmul(variance.sum(0), up, down, value=2), slope.sum(0)


def _narrow(dtype: torch.dtype, *moments: Tensor) -> Moments:
    mean, variance, slope = moments
    return mean.to(dtype), variance.to(dtype), slope.to(dtype)
