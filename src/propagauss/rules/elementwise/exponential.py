"""First two moments of the exponential linear units, ELU, CELU and SELU, in closed form.

    g(x) = B x for x > 0,    A (exp(c x) - 1) for x <= 0,        x ~ N(m, v)

In units of `1/c`, and with `k = c A/B`, it is `B/c` times `h(x) - k`, `h(x) = x + k` for `x > 0` and `k exp(x)` for
`x <= 0`. With `u_j = (m + j v)/s`, `s = √v`, the integrals of exponentials against the normal density are

    M_j = ∫_{x < 0} exp(j x) = exp(j m + j² v/2) Φ(-u_j) = exp(log Φ(-u_j) + j (2 m + j v)/2)

where the exponent is never positive, so that nothing overflows. With `P = Φ(u_0)` and
`R = E[relu(x)] = m P + s φ(u_0)`,

    E[h] = k M_1 + R + k P        E[h²] = k² M_2 + m R + v P + 2 k R + k² P        E[h'] = P + k M_1

of which all are small where `h` is, far below zero: the variance keeps its digits there. In few ops, as calls cost more
than the numbers in them where these are few.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from propagauss.rules.elementwise.pieces import log_cdf, wide
from propagauss.rules.elementwise.quadrature.sums import Found, in_blocks, lifted

LARGE = 600.0  # an exponential of it, or of its negative, is a normal number
FLOOR = 2e-10


class Elu(nn.Module):
    """`E[g]`, `Var[g]` and `E[g']`, `A = alpha scale`, `B = scale`, `c = input_scale`.

    In double precision, since the variance is a difference of squares. Below a floor, relative to these squares,
    deviations from `g(m)` are extrapolated: the mean linearly in `v`, and so is the variance.
    """

    steps: Tensor
    sides: Tensor

    def __init__(self, dtype: torch.dtype, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0):
        super().__init__()
        self.alpha, self.scale, self.input_scale = alpha, scale, input_scale
        steps = torch.arange(3, dtype=dtype).view(-1, 1, 1)
        self.register_buffer("steps", steps)
        self.register_buffer("sides", torch.where(steps > 0, -1.0, 1.0).to(dtype))

    def forward(self, m: Tensor, v: Tensor, slope: bool = True) -> Found:
        """The slope only if it is asked for."""
        return in_blocks(self._moments, m, v, slope)

    def _moments(self, m: Tensor, v: Tensor, slope: bool) -> Found:
        c, line, k = self.input_scale, self.scale / self.input_scale, self.alpha * self.input_scale
        dtype, m, v = m.dtype, wide(m), wide(v)
        centre = self._value(m)
        if c != 1:
            m, v = c * m, c * c * v
        j, sides = lifted(wide(self.steps), m), lifted(wide(self.sides), m)
        floored = v.maximum(FLOOR * torch.addcmul(j[1], m, m))
        s, share = floored.sqrt(), v / floored
        moved = torch.addcmul(m, j, floored)
        u = moved / (sides * s)
        exponent = torch.addcmul(log_cdf(u), j, moved + m, value=0.5)
        above, first, second = exponent.clamp(-LARGE, 0.0).exp().unbind(0)  # rounding may make it positive
        relu = torch.addcmul(m * above, s, torch.exp(u[0] * u[0] * -0.5), value=1 / math.sqrt(2 * math.pi))
        mean = relu + _times(k, first + above)
        square = torch.addcmul(_times(k * k, second + above), m + 2 * k, relu)
        variance = torch.addcmul(torch.addcmul(square, floored, above), mean, mean, value=-1).relu() * share
        mean = _times(line, mean - k)
        along = (self.scale * torch.add(above, first, alpha=k)).to(dtype) if slope else None
        return torch.lerp(centre, mean, share).to(dtype), _times(line * line, variance).to(dtype), along

    def _value(self, x: Tensor) -> Tensor:
        """`g(x)`; in ops of its own in exported graphs, as their runtimes lack it in double precision."""
        if not torch.compiler.is_exporting():
            return torch.ops.aten.elu(x, self.alpha, self.scale, self.input_scale)
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
