"""First two moments of clips, thresholds, shrinkages and hard swish, in closed form.

These are sums of powers of what lies past a knot. With `x ~ N(m, v)`, `s = √v`, the knot at a distance `u` from the
mean and `w` how far `x` is past it, seen from the mean (0 if it is not), `q = Φ(-u/s)` and `p = φ(u/s)`:

    K_1 = E[w] = s p - u q        K_2 = E[w²] = v q - u K_1        K_(i+1) = i v K_(i-1) - u K_i

All of them vanish with the probability of being past the knot, so that nothing large cancels where the variance is
small. In double precision, as the sums are small differences where it is large.

Written out, each takes far fewer ops than a sum over pieces, and calls cost more than the numbers in them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from propagauss.rules.elementwise.pieces import FAR, normal_tail, wide

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


def clip(m: Tensor, v: Tensor, low: float, high: float) -> Moments:
    """`x` between `low` and `high`, else the nearer of the two: `x - relu(x - high) + relu(low - x)`. With `R` and `P`
    the mean and the mean slope of the first ReLU, as in `threshold` with `J = 0`, and with a bar of the second one:

        E[g] = g(m) - K_1 + K̄_1        E[g'] = 1 - P - P̄
        Var[g] = v E[g'] - K_1 (K_1 + u) - K̄_1 (K̄_1 + ū) + 2 R R̄
    """
    dtype, m, v = m.dtype, wide(m), wide(v)
    t = torch.stack([m - high, low - m])
    side, u, _, _, q, first = _past(t, v)
    slope = (side * q).sum(0) - (side.relu().sum(0) - 1)
    variance = torch.addcmul(v * slope, *(t.relu() + first).unbind(0), value=2) - (first * (first + u)).sum(0)
    up, down = first.unbind(0)
    return _narrow(dtype, m.clamp(low, high) - up + down, variance.clamp(min=0), slope)


def clamp(m: Tensor, v: Tensor, min: float | None = None, max: float | None = None) -> Moments:
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    if low >= high:
        return torch.full_like(m, high), torch.zeros_like(v), torch.zeros_like(m)
    if math.isinf(high):
        return (m, v, torch.ones_like(m)) if math.isinf(low) else threshold(m, v, low, low)
    if math.isinf(low):
        mean, variance, slope = threshold(-m, v, -high, -high)
        return -mean, variance, slope
    return clip(m, v, low, high)


def hardsigmoid(m: Tensor, v: Tensor) -> Moments:
    """`clip(x, -3, 3)/6 + 1/2`"""
    mean, variance, slope = clip(m, v, -3.0, 3.0)
    return mean / 6 + 0.5, variance / 36, slope / 6


def hardshrink(m: Tensor, v: Tensor, lambd: float = 0.5) -> Moments:
    """`x` where `|x| > λ`, else 0. With `n = |m|`, `y = g(n)`, `o = 1` if `n > λ` else 0, and `q`, `p` the normal tail
    and density at `|λ - n|/s` and (with a bar) at `(λ + n)/s`:

        B = (1 - 2 o) q + q̄        U = n B + s (p - p̄)        E[g] = ± (y + U)        E[g'] = o + B + λ (p + p̄)/s
        Var[g] = o v + (n² + v) B + s ((λ + n) p + (λ - n) p̄) - U (U + 2 y)

    Every term but the first vanishes with the probability of being on another piece than the mean. It is the
    difference of two thresholds, of `x` and of `-x`, but takes fewer ops in this form.
    """
    dtype, m, v = m.dtype, wide(m), wide(v)
    if lambd < 0:  # all of the line, but for the point zero
        return _narrow(dtype, m, v, torch.ones_like(m))
    floored = v.clamp(min=torch.finfo(v.dtype).tiny ** 0.5)
    share, s, n = v / floored, floored.sqrt(), m.abs()
    y = aten.hardshrink(n, lambd)
    outside = y.sign()
    short, long = lambd - n, lambd + n
    at = (torch.stack([short, long]).abs() / s).clamp(max=FAR)
    (p, p_far), (q, q_far) = _scaled_density(at, s).unbind(0), normal_tail(at).unbind(0)
    both = torch.addcmul(q + q_far, outside, q, value=-2)
    shift = torch.addcmul(p - p_far, n, both)
    variance = torch.addcmul(long * p, short, p_far) + torch.addcmul(floored, n, n) * both
    variance = torch.addcmul(torch.addcmul(variance, outside, floored), shift, torch.add(shift, y, alpha=2), value=-1)
    slope = outside + both + lambd * (share / floored) * (p + p_far)
    mean = torch.addcmul(y, share, shift) * m.sign()
    return _narrow(dtype, mean, share * variance.clamp(min=0), slope)


def softshrink(m: Tensor, v: Tensor, lambd: float = 0.5) -> Moments:
    """`relu(x - λ) - relu(-x - λ)`, of which one is always zero. With `R`, `V` and `P` the mean, the variance and the
    mean slope of the first one, as in `threshold` with `J = 0`, and with a bar of the second one:

        E[g] = R - R̄        Var[g] = V + V̄ + 2 R R̄        E[g'] = P + P̄
    """
    mean, variance, slope = _threshold(_both(wide(m)) - lambd, wide(v), 0.0, 0.0)
    up, down = mean.unbind(0)
    return _narrow(m.dtype, up - down, torch.addcmul(variance.sum(0), up, down, value=2), slope.sum(0))


def hardswish(m: Tensor, v: Tensor) -> Moments:
    """`x (x + 3)/6` between the knots `k = ±3`, 0 below and `x` above. A mean beyond a knot has `c = -1` there, else
    `c = 1`, and `x` past the knot changes `6 g` by `-(3 w + c w²)`. With `y = g(m)`, `i = 1` between the knots, else 0:

        e_k = 3 K_1 + c K_2        E[g] = y + (i v - Σ e_k)/6        E[g'] = g'(m) - Σ ± (2 K_1 + 3 c q)/6
        Var[g] = v (g'(m)² + i v/18) + Σ e_k (12 E[g] + Σ e_k)/36
                 - Σ (6 K_3 + c (9 K_2 + K_4))/36 - (3 e_k + 3 c K_2 + K_3)/3 at k = 3
    """
    dtype, m, v = m.dtype, wide(m), wide(v)
    side, u, _, _, q, first = _past(_both(m) - 3, v)
    second = torch.addcmul(v * q, u, first, value=-1)
    third = torch.addcmul(u * second, v, first, value=-2)  # -K_3
    fourth = torch.addcmul(u * third, v, second, value=3)
    even = side * second  # -c K_2
    added = torch.sub(even, first, alpha=3)  # -e_k
    total, inner = added.sum(0), side.sum(0)  # the latter is -2 i
    bend = inner * v
    ramp = (m * (1 / 6) + 0.5).clamp(0, 1)
    mean = torch.addcmul(torch.add(total, bend, alpha=-0.5) * (1 / 6), m, ramp)
    slope = torch.addcmul(ramp, inner, m, value=-1 / 12)
    variance = torch.sub(slope * slope, bend, alpha=1 / 36) * v
    variance = torch.addcmul(variance, total, torch.sub(total, mean, alpha=12), value=1 / 36)
    knots = torch.addcmul(torch.add(third, even, alpha=1.5), side, fourth, value=1 / 6).sum(0)
    variance = torch.add(variance, knots, alpha=1 / 6)
    variance = torch.add(variance, torch.add(third, added + even, alpha=3)[0], alpha=1 / 3)
    up, down = torch.addcmul(first, side, q, value=-1.5).unbind(0)
    return _narrow(dtype, mean, variance.clamp(min=0), torch.sub(slope, up - down, alpha=1 / 3))


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
    scaled, q = _scaled_density(a, s), normal_tail(a)
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


def _scaled_density(a: Tensor, s: Tensor) -> Tensor:
    """`s φ(a)`"""
    return torch.exp(a * a * -0.5) * (s * (1 / math.sqrt(2 * math.pi)))


def _both(m: Tensor) -> Tensor:
    return torch.stack([m, -m])


def _narrow(dtype: torch.dtype, *moments: Tensor) -> Moments:
    mean, variance, slope = moments
    return mean.to(dtype), variance.to(dtype), slope.to(dtype)
