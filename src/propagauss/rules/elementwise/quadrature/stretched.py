"""First two moments of functions with one kink at most and tails of any kind: softsign, arctangent, ELU and the like.

The trapezoidal rule, `K` equidistant nodes `u_j` that are the same for all entries, in a variable `τ` in which the
function bends on one scale only. With `α = (m - k)/s`, `k` the kink or the place where the function bends,

    E[f(x)] = Σ_j w 3 τ_j² φ(z_j) f(m + s z_j),        z_j = τ_j³ - α,        τ_j = u_j + β α

so that few nodes do, whether the standard deviation is small or large compared with the bend at `k`: there, at `τ = 0`,
they are dense, and far out `τ` grows like the third root of `z`. In `τ` even a kink is smooth: `|x|` is `s |τ|³`. The
factor `β` keeps `R` standard deviations on either side of the mean within the nodes, wherever the kink is. Whether a
function is of this kind, and how many nodes it takes, is not guessed: `stretched` compares with a fine quadrature over
all means and variances that matter.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from propagauss.rules.elementwise.quadrature.borders import Borders
from propagauss.rules.elementwise.quadrature.design import Keyed, agrees, grid, reference
from propagauss.rules.elementwise.quadrature.sums import Found, in_blocks, lifted, moments, raised

TOLERANCE = 3e-5


class Nodes(NamedTuple):
    """How many, how far they reach (`R`), and how close a kink must be to count; in standard deviations."""

    count: int
    reach: float
    close: float


SIZES = (Nodes(36, 5.4, 6.3), Nodes(40, 5.6, 6.5), Nodes(48, 7.0, 7.0))  # to choose from


class Stretched(nn.Module):
    """`E[g]`, `Var[g]` and the regression slope `Cov(x, g)/v` from `m` and `v`."""

    nodes: Tensor
    weight: Tensor
    eps: Tensor

    def __init__(self, function: nn.Module, kink: float, nodes: Nodes, dtype: torch.dtype):
        super().__init__()
        self.function, self.kink, self.close = function, kink, nodes.close
        end = nodes.reach ** (1 / 3)
        step = 2 * end / (nodes.count - 1)
        self.shift = 1 / (3 * end * end)  # β: the ends of the nodes move as the `τ` of `z = ±R` do
        u = torch.linspace(-end, end, nodes.count, dtype=torch.float64)
        weight = math.log2(3 * step / math.sqrt(2 * math.pi))  # its logarithm, in the exponent, saves an op
        self.register_buffer("nodes", u.view(-1, 1, 1).to(dtype))
        self.register_buffer("weight", torch.tensor(weight, dtype=dtype))
        self.register_buffer("eps", torch.tensor(torch.finfo(dtype).eps, dtype=dtype))

    def forward(self, m: Tensor, v: Tensor, slope: bool = True) -> Found:
        """The slope only if it is asked for."""
        return in_blocks(self._moments, m, v, slope)

    def _moments(self, m: Tensor, v: Tensor, slope: bool) -> Found:
        s, share = raised(m, v, self.eps)
        alpha = (m - self.kink if self.kink else m) / s
        minus_alpha = torch.hardshrink(alpha, self.close) - alpha  # zero if the kink is too far away to count
        tau = torch.add(lifted(self.nodes, m), minus_alpha, alpha=-self.shift)  # [K, *m.shape]
        square = tau * tau
        z = torch.addcmul(minus_alpha, square, tau)
        mass = torch.exp2(torch.addcmul(self.weight, z, z, value=-0.5 / math.log(2))) * square  # `exp` is slower
        return moments(self.function, m, (s, share), (z, mass), slope)


def stretched(graph: fx.GraphModule, borders: Borders, dtype: torch.dtype) -> Stretched | None:
    """The rule for an elementwise function of one variable; None if it is not of this kind."""
    is_one = sum(n.op == "placeholder" for n in graph.graph.nodes) == 1
    if not is_one or borders.affine or borders.bent or borders.ends or len(borders.kinks) > 1:
        return None
    kink = borders.kinks[0] if borders.kinks else 0.0
    nodes = _fewest(Keyed(graph), kink)
    return None if nodes is None else Stretched(graph, kink, nodes, dtype)


@cache
def _fewest(function: Keyed, kink: float) -> Nodes | None:
    g = function.graph
    far = torch.logspace(-3, 6, 200, dtype=torch.float64)
    with torch.no_grad():
        if not bool(g(torch.cat([-far, far])).isfinite().all()):
            return None
        m, s = grid()
        true = reference(g, m, s)
        for nodes in SIZES:
            if agrees(Stretched(g, kink, nodes, torch.float64)(m, s.square()), true, s, TOLERANCE):
                return nodes
    return None
