"""First two moments of the exponential linear units, ELU, CELU and SELU, in closed form.

    g(x) = B x for x > 0,    A (exp(c x) - 1) for x <= 0,        x ~ N(m, v)

In units of `1/c`, and with `k = c A/B`, it is `B/c` times the function `x` for `x > 0`, `k (exp(x) - 1)` for `x <= 0`.
With `u_j = (m + j v)/s`, `s = √v`, the integrals of exponentials against the normal density are

    M_j = ∫_{x < 0} exp(j x) = exp(j m + j² v/2) Φ(-u_j) = exp(log Φ(-u_j) + j (2 m + j v)/2)

where the exponent is never positive, so that nothing overflows. With `R = E[relu(x)] = m (1 - M_0) + s φ(m/s)` and
`D = M_1 - M_0`, the moments of that function are

    E = R + k D        Var = v (1 - M_0) + R (m - R) + k² (M_2 - 2 M_1 + M_0) - k D (R + E)        E' = 1 - M_0 + k M_1

In few ops, as calls cost more than the numbers in them where these are few.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from propagauss.rules.elementwise.pieces import log_cdf, wide
from propagauss.rules.elementwise.quadrature.sums import Found, in_blocks, lifted


class Elu(nn.Module):
    """`E[g]`, `Var[g]` and `E[g']`, `A = alpha scale`, `B = scale`, `c = input_scale`.

    In double precision, since the terms of the variance are of order one, and their sum of the order of `v`. Below a
    floor the mean is that at the floor, which is wrong by some 1e-6 at a kink, and the variance is extrapolated
    linearly.
    """

    minus_steps: Tensor

    def __init__(self, dtype: torch.dtype, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0):
        super().__init__()
        self.alpha, self.scale, self.input_scale = alpha, scale, input_scale
        self.register_buffer("minus_steps", -torch.arange(3, dtype=dtype).view(-1, 1, 1))

    def forward(self, m: Tensor, v: Tensor, slope: bool = True) -> Found:
        """The slope only if it is asked for."""
        return in_blocks(self._moments, m, v, slope)

    def _moments(self, m: Tensor, v: Tensor, slope: bool) -> Found:
        c, line, k = self.input_scale, self.scale / self.input_scale, self.alpha * self.input_scale
        dtype, m, v = m.dtype, wide(m), wide(v)
        if c != 1:
            m, v = c * m, c * c * v
        floored = v.clamp_min(torch.finfo(m.dtype).eps ** (5 / 8))
        s = floored.sqrt()
        minus_j = lifted(wide(self.minus_steps), m)
        moved = minus_j * floored - m
        minus_u = moved / s
        exponent = torch.addcmul(log_cdf(minus_u), minus_j, moved - m, value=0.5)
        below, first, second = exponent.clamp_max(0.0).exp().unbind(0)  # rounding may make it positive
        a = minus_u[0]
        past = torch.addcmul(m * below, s, torch.exp(a * a * -0.5), value=-1 / math.sqrt(2 * math.pi))  # m - R
        relu, drop = m - past, first - below
        mean = _plus(relu, drop, k)
        variance = torch.addcmul(torch.addcmul(floored, floored, below, value=-1), relu, past)
        variance = _plus(variance, second - first - drop, k * k)
        variance = torch.addcmul(variance, drop, mean + relu, value=-k).relu() * (v / floored)
        if line != 1:
            mean, variance = line * mean, line * line * variance
        along = (self.scale * (1 - below + k * first)).to(dtype) if slope else None
        return mean.to(dtype), variance.to(dtype), along


class Celu(Elu):
    def __init__(self, dtype: torch.dtype, alpha: float = 1.0):
        super().__init__(dtype, alpha, 1.0, 1 / alpha)


class Selu(Elu):
    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _plus(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """`a + factor b`; a call with a factor costs half as much again."""
    return a + b if factor == 1 else torch.add(a, b, alpha=factor)
