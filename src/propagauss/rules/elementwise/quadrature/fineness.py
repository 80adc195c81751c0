"""How fine the panels of a function have to be, found when a network is built: by comparison with finer ones.

Panels of a fixed width in standard deviations miss what happens within them: a function that oscillates, or a bump that
is narrow compared with the standard deviation. So panels are split until finer ones give the same moments, over a grid
of means and standard deviations. Where even the finest do not, the largest standard deviation up to which they do is
known, and the plan says it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, fx

from propagauss.rules.elementwise.quadrature.borders import Borders
from propagauss.rules.elementwise.quadrature.design import Keyed
from propagauss.rules.elementwise.quadrature.panels import BASE, legendre, quadrature

SPLITS = (1, 2, 4, 8)  # parts of each panel, to choose from
FINEST = 27  # parts of each panel in the comparison; no multiple of the others, so that nodes do not coincide
ENOUGH = 10.0  # standard deviation beyond which panels are not made finer
TOLERANCE = 1e-3  # of the mean, in standard deviations; three times that for variances and slopes
MEANS, SCALES = (0.05, 0.7, 1.7, 2.9, 6.2, 14.0), (0.03, 0.3, 1.0, 2.0, 4.0, ENOUGH, 100.0)


class Fineness(NamedTuple):
    """Into how many parts each panel is split, and up to which standard deviation moments are then right."""

    splits: int
    reach: float  # infinite if they are right wherever they were compared

    @property
    def limit(self) -> str:
        """What the plan says of it, behind what it says of all moments."""
        if self.reach == 0:
            return " by quadrature that is too coarse for this function: only roughly"
        return f" by quadrature, for standard deviations up to {self.reach:g}" if math.isfinite(self.reach) else ""


def split_panels(splits: int, dtype: torch.dtype) -> Tensor:
    """The borders of all functions, with each panel split into equal parts: `[6 splits + 1]`."""
    borders = torch.tensor(BASE, dtype=torch.float64)
    parts = torch.arange(splits, dtype=torch.float64) / splits
    inner = borders[:-1, None] + borders.diff()[:, None] * parts
    return torch.cat([inner.flatten(), borders[-1:]]).to(dtype)


def fineness(graph: fx.GraphModule | None, borders: Borders) -> Fineness:
    """Of a function of one variable that ends nowhere; of any other, panels are as they are, and nothing is known."""
    if graph is None or borders.ends or sum(n.op == "placeholder" for n in graph.graph.nodes) != 1:
        return Fineness(1, math.inf)
    return _found(Keyed(graph))


@cache
def _found(function: Keyed) -> Fineness:
    g = function.graph
    means, scales = (torch.tensor(values, dtype=torch.float64) for values in (MEANS, SCALES))
    m, s = (t.flatten() for t in torch.meshgrid(torch.cat([-means, means]), scales, indexing="ij"))
    borders, rule = Borders(g), legendre(torch.float64)

    def moments(splits: int) -> tuple[Tensor, ...]:
        base = split_panels(splits, torch.float64)
        return quadrature(g, (m, s.square()), (base, *rule), borders, None, borders.is_total)

    best = Fineness(1, -1.0)
    with torch.no_grad():
        true = moments(FINEST)
        for splits in SPLITS:
            reach = _reach(moments(splits), true, s)
            if reach > best.reach:
                best = Fineness(splits, reach)
            if reach >= ENOUGH:
                break
    return best


def _reach(found: tuple[Tensor, ...], true: tuple[Tensor, ...], s: Tensor) -> float:
    """The largest standard deviation of the grid up to which all moments agree; infinite if all do."""
    deviation = true[1].sqrt()
    slack = 1e-7 * s * (deviation / s).amax()  # below the last digits of single precision, given the steepest place
    off = ((found[0] - true[0]).abs(), (found[1] - true[1]).abs() / 3, (found[2] - true[2]).abs() * s / 3)
    sizes = (deviation, true[1], deviation)
    wrong = torch.stack(
        [o > TOLERANCE * size + least for o, size, least in zip(off, sizes, (slack, slack**2, slack), strict=True)]
    )
    reach = 0.0
    for scale in SCALES:
        if bool(wrong[:, s == scale].any()):
            return reach
        reach = scale
    return math.inf
