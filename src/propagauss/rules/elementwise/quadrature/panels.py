"""First two moments of any elementwise `g(x)`, `x ~ N(m, v)`, by Gauss-Legendre rules on panels.

    E[f(x)] = Σ_p Σ_r w_pr φ(z_pr) f(m + √v z_pr),    z_p1 ... z_pR between the borders of panel p

Panels cover eight standard deviations on both sides. A rule of this kind converges fast only where the function is
smooth, so that borders are put wherever it is not: where a comparison inside it changes its answer, at the kinks of its
parts, and around the places where functions such as tanh bend (`borders.py` reads them off the graph of the function).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ORDER = 8  # nodes on a panel
NEGLIGIBLE = 1e-7  # probability of a node
BASE = (-8.0, -4.5, -2.0, 0.0, 2.0, 4.5, 8.0)  # borders of all functions, in standard deviations: wider in the tails


def legendre(dtype: torch.dtype, order: int = ORDER) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss-Legendre rule on [0, 1]: `[R]`, `[R]`."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    return torch.tensor((nodes + 1) / 2, dtype=dtype), torch.tensor(weights / 2, dtype=dtype)


def merged(borders: Tensor, more: list[Tensor]) -> Tensor:
    """`borders [Q, *shape]`, in order, with others put in where they belong: `[Q + len(more), *shape]`."""
    for value in more:
        first, last = borders[:1], borders[-1:]
        value = value.clamp(BASE[0], BASE[-1]).unsqueeze(0)
        lower, upper = torch.cat([first, borders]), torch.cat([borders, last])
        borders = torch.maximum(lower, torch.minimum(upper, value))  # before it, itself, behind it
    return borders


def quadrature(
    g: Callable[[Tensor], Tensor],
    at: tuple[Tensor, Tensor],
    rule: tuple[Tensor, Tensor, Tensor],
    borders: Callable[[Tensor, Tensor, Tensor], list[Tensor]],
    room: Tensor | None = None,
    is_total: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`E[g]`, `Var[g]` and the regression slope `Cov(x, g)/v`, which is `E[g']` (Stein).

    Below a floor, where the nodes would collapse onto the mean, moments are extrapolated linearly in `v`. So in single
    precision a jump is seen from some 3e-4 away even if the standard deviation is smaller.

    Args:
        at: `m` and `v`.
        rule: borders in standard deviations that all entries share, in order, and a rule from `legendre`.
        borders: from `m`, the standard deviation and the shared borders, further borders of each entry, in any order.
        room: distance of the mean from where `g` ends or is infinite, as far as that is known.
        is_total: whether `g` is known to be a number everywhere.
    """
    m, v = at
    base, nodes, weights = rule
    floor = least_variance(m.detach(), room)
    wide = v.maximum(floor)
    share, s = v / wide, wide.sqrt()
    z, mass = _points(base, nodes, weights, m, borders(m, s, base))
    centre = g(m)
    values = g(torch.addcmul(m, s, z)) - centre  # [P R, *m.shape]
    if not is_total:
        # far tails may lie where g is not defined; what has next to no probability there counts for nothing
        outside = values.isnan() & (mass < NEGLIGIBLE)
        values, mass = values.masked_fill(outside, 0.0), mass.expand_as(values).masked_fill(outside, 0.0)
    shift = (mass * values).sum(0)
    deviation = values - shift
    weighted = mass * deviation
    variance = (weighted * deviation).sum(0)
    slope = (weighted * z).sum(0) / s
    return centre + share * shift, share * variance, slope


def least_variance(m: Tensor, room: Tensor | None = None) -> Tensor:
    """The least variance at which nodes and values of a function differ in more than their last digits.

    A function such as the logarithm changes over the distance to where it ends: nodes stay well within that.
    """
    eps = torch.finfo(m.dtype).eps
    floor = eps * (1 + m.square())
    if room is None:
        return floor
    least = (8 * eps * m).square() + torch.finfo(m.dtype).tiny
    return floor.minimum((room.detach() / 256).square()).maximum(least)


def _points(base: Tensor, nodes: Tensor, weights: Tensor, m: Tensor, more: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Nodes in standard deviations and their probabilities: `[P R, *m.shape]`, or `[P R, 1, ...]` if all are alike."""
    lift = [1] * m.dim()
    borders = base.reshape(-1, *lift)
    if more:
        borders = merged(borders.expand(-1, *m.shape), more)
    start, width = borders[:-1].unsqueeze(1), borders.diff(dim=0).unsqueeze(1)
    z = torch.addcmul(start, width, nodes.reshape(-1, *lift)).flatten(0, 1)
    share = (width / math.sqrt(2 * math.pi) * weights.reshape(-1, *lift)).flatten(0, 1)
    return z, share * torch.exp(z * (-0.5 * z))
