"""First two moments of the exponential linear units, ELU, CELU and SELU, in closed form.

    g(x) = B x for x > 0,    A (exp(c x) - 1) for x <= 0,        x ~ N(m, v)

In units of `1/c`, that is with `c = 1` and `B/c` for `B`, and with `u_j = (m + j v)/s`, `s = √v`, the integrals of
exponentials against the normal density are

    M_j = ∫_{x < 0} exp(j x) = exp(j m + j² v/2) Φ(-u_j) = exp(log Φ(-u_j) + j (2 m + j v)/2)

where the exponent is never positive, so that nothing overflows. With `R = E[relu(x)] = m (1 - M_0) + s φ(m/s)`,

    E[g] = B R + A (M_1 - M_0)        E[g²] = B² (m R + v (1 - M_0)) + A² (M_2 - 2 M_1 + M_0)
    E[g'] = B (1 - M_0) + A M_1
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from propagauss.rules.elementwise.pieces import log_tail, wide
from propagauss.rules.elementwise.quadrature.sums import Found, in_blocks, lifted

aten = torch.ops.aten
LARGE = 600.0  # an exponential of it is a number, also where it is not used


class Elu(nn.Module):
    """`E[g]`, `Var[g]` and `E[g']`, `A = alpha scale`, `B = scale`, `c = input_scale`.

    In double precision, since the variance is the difference of two numbers that may be much larger. Its last digits
    are lost where the variance of `x` is small against one or the square of the mean: below a floor, moments are
    extrapolated linearly in `v`.
    """

    steps: Tensor

    def __init__(self, dtype: torch.dtype, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0):
        super().__init__()
        self.alpha, self.scale, self.input_scale = alpha, scale, input_scale
        self.register_buffer("steps", torch.arange(3, dtype=dtype).view(-1, 1, 1))

    def forward(self, m: Tensor, v: Tensor, slope: bool = True) -> Found:
        """The slope only if it is asked for."""
        return in_blocks(self._moments, m, v, slope)

    def _moments(self, m: Tensor, v: Tensor, slope: bool) -> Found:
        c, low, line = self.input_scale, self.alpha * self.scale, self.scale / self.input_scale
        dtype, m, v = m.dtype, wide(m), wide(v)
        centre = self._value(m)
        if c != 1:
            m, v = c * m, c * c * v
        j = lifted(wide(self.steps), m)
        zero, one, _ = j.unbind(0)
        floor = torch.finfo(m.dtype).eps ** (2 / 3)
        floored = v.maximum(floor * torch.addcmul(one, m, m))
        s, share = floored.sqrt(), v / floored
        moved = torch.addcmul(m, j, floored)
        u = moved / s
        exponent = torch.addcmul(log_tail(u), j, moved + m, value=0.5)
        below, first, second = exponent.clamp(-LARGE, 0).exp().unbind(0)  # smaller numbers are subnormal, and slow
        density = torch.addcmul(zero, u[0], u[0], value=-0.5).exp()
        relu = torch.addcmul(torch.addcmul(m, s, density, value=1 / math.sqrt(2 * math.pi)), m, below, value=-1)
        square = torch.addcmul(torch.addcmul(floored, floored, below, value=-1), m, relu)
        drop = first - below
        mean = torch.add(_times(line, relu), drop, alpha=low)
        square = torch.add(_times(line * line, square), second - first - drop, alpha=low * low)
        variance = torch.addcmul(square, mean, mean, value=-1).relu()
        mean, variance = torch.lerp(centre, mean, share).to(dtype), (share * variance).to(dtype)
        if not slope:
            return mean, variance, None
        return mean, variance, (self.scale * (1 - below) + (low * c) * first).to(dtype)

    def _value(self, x: Tensor) -> Tensor:
        """`g(x)`; in ops of its own in exported graphs, as their runtimes lack it in double precision."""
        if not torch.compiler.is_exporting():
            return aten.elu(x, self.alpha, self.scale, self.input_scale)
        bent = (self.alpha * self.scale) * torch.expm1((self.input_scale * x).clamp(max=LARGE))
        return torch.where(x > 0, self.scale * x, bent)


class Celu(Elu):
    def __init__(self, dtype: torch.dtype, alpha: float = 1.0):
        super().__init__(dtype, alpha, 1.0, 1 / alpha)


class Selu(Elu):
    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _times(factor: float, t: Tensor) -> Tensor:
    return t if factor == 1 else factor * t
