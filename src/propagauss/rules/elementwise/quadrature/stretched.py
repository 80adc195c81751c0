"""First two moments of functions with one kink at most and tails of any kind: softsign, arctangent and the like.

Gauss-Legendre rules on both sides of the kink `k`, in a variable `t` in which the function bends on one scale only,

    x = k + t + t³,        E[f(x)] = Σ_p Σ_r w_r |p| (1 + 3 t_pr²) φ(z_pr)/s f(x_pr),        z = (x - m)/s

so that few nodes do, whether the standard deviation is small or large compared with the bend at `k`: far out, `t` grows
like the third root of `x`. Whether a function is of this kind, and how many nodes it takes, is not guessed: `stretched`
compares with a fine quadrature over all means and variances that matter.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, fx, nn

from propagauss.rules.elementwise.quadrature.borders import Borders
from propagauss.rules.elementwise.quadrature.design import Function, Keyed, agrees, grid, reference
from propagauss.rules.elementwise.quadrature.panels import least_variance, legendre

REACH = 6.1  # standard deviations
CLOSE = 4.0  # a kink farther away does not count, and there is a border here instead:
INSTEAD = -2.0
# nodes on the mean's side of the kink and on the other, to choose from
SIZES = ((20, 12), (22, 14), (22, 16), (26, 20))
TOLERANCE = 3e-5
BLOCK = 8192  # entries at once: values at nodes that stay in the cache are twice as fast


class Stretched(nn.Module):
    """`E[g]`, `Var[g]` and the regression slope `Cov(x, g)/v` from `m` and `v`."""

    own: Tensor
    other: Tensor
    weights: Tensor

    def __init__(self, function: Function, kink: float, sizes: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.function, self.kink = function, kink
        (own, w), (other, u) = (legendre(torch.float64, n) for n in sizes)
        weights = torch.block_diag(w.unsqueeze(0), u.unsqueeze(0)) / math.sqrt(2 * math.pi)
        for name, value in {"own": own, "other": other, "weights": weights}.items():
            self.register_buffer(name, value.to(dtype))

    def forward(self, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling() or v.shape != m.shape or m.numel() <= BLOCK:
            return self._moments(m, v)
        blocks = zip(m.flatten().split(BLOCK), v.flatten().split(BLOCK), strict=True)
        parts = zip(*(self._moments(*each) for each in blocks), strict=True)
        mean, variance, slope = (torch.cat(each).view(m.shape) for each in parts)
        return mean, variance, slope

    def _moments(self, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Seen from the side of the mean: `n = |m - k|`, and `z` grows away from the kink.

        Below a floor, where the nodes would collapse onto the mean, moments are extrapolated linearly in `v`.
        """
        floored = v.maximum(least_variance(m.detach()))
        scale = floored.rsqrt()
        s, away = floored * scale, m - self.kink
        sign = torch.where(away < 0, -1.0, 1.0)
        n = away * sign  # not `abs`, whose derivative at zero is zero
        split = n * scale
        split = torch.where(split < CLOSE, -split, INSTEAD)
        t = third_root(torch.stack([n, n + REACH * s, torch.addcmul(n, s, split), n - REACH * s]))
        centre, borders = t[0], t[1:] - t[0]
        widths, lift = borders[:-1] - borders[1:], [1] * m.dim()
        sides = [
            torch.addcmul(start, width, nodes.reshape(-1, *lift))
            for start, width, nodes in zip(borders[1:], widths, (self.own, self.other), strict=True)
        ]
        d = torch.cat(sides)  # t - t(mean), [R, *m.shape]
        # z = d (1 + 3 t² + 3 t d + d²)/s, in which nothing cancels, and its derivative
        slant = torch.addcmul(3 * centre * scale, d, scale)
        chord = torch.addcmul(torch.addcmul(scale, 3 * centre * centre, scale), d, slant)
        rate = torch.addcmul(chord, d, torch.addcmul(slant, d, scale))
        z = d * chord
        at_mean = self.function(m)
        values = self.function(torch.addcmul(m, s * sign, z)) - at_mean
        density = torch.exp(torch.addcmul(z.new_zeros(()), z, z, value=-0.5)) * rate
        once = density * values
        shift, second, along = (self._sum(each, widths) for each in (once, once * values, once * z))
        share = v / floored
        variance = torch.addcmul(second, shift, shift, value=-1).clamp(min=0)
        return torch.addcmul(at_mean, share, shift), share * variance, along * (scale * sign)

    def _sum(self, values: Tensor, widths: Tensor) -> Tensor:
        sides = (self.weights @ values.reshape(len(values), -1)).reshape(widths.shape)
        return (sides * widths).sum(0)


def third_root(x: Tensor) -> Tensor:
    """The `t` of `x = t + t³`, `2/√3 sinh(asinh(3√3/2 x)/3)`; the inverse written out is four times as fast."""
    sign = torch.where(x < 0, -1.0, 1.0)
    y = x * ((1.5 * math.sqrt(3)) * sign)
    third = torch.log(y + torch.sqrt(y * y + 1)) / 3
    return torch.sinh(third) * ((2 / math.sqrt(3)) * sign)


def stretched(graph: fx.GraphModule, borders: Borders, dtype: torch.dtype) -> Stretched | None:
    """The rule for an elementwise function of one variable; None if it is not of this kind."""
    is_one = sum(n.op == "placeholder" for n in graph.graph.nodes) == 1
    if not is_one or borders.affine or borders.bent or borders.ends or len(borders.kinks) > 1:
        return None
    kink = borders.kinks[0] if borders.kinks else 0.0
    sizes = _fewest(Keyed(graph), kink)
    return None if sizes is None else Stretched(graph, kink, sizes, dtype)


@cache
def _fewest(function: Keyed, kink: float) -> tuple[int, int] | None:
    g = function.graph
    far = torch.logspace(-3, 6, 200, dtype=torch.float64)
    with torch.no_grad():
        if not bool(g(torch.cat([-far, far])).isfinite().all()):
            return None
        m, s = grid()
        true = reference(g, m, s)
        for sizes in SIZES:
            if agrees(Stretched(g, kink, sizes, torch.float64)(m, s.square()), true, s, TOLERANCE):
                return sizes
    return None
