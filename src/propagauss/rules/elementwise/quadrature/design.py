"""How a rule for an elementwise function is chosen when a network is built: by comparison with a fine quadrature.

A rule that agrees on a grid of means and standard deviations is taken, with the fewest nodes that do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

Function = Callable[[Tensor], Tensor]
TOLERANCE = 1e-5  # of the mean, in standard deviations; three times that for variances and slopes


class Keyed:
    """A function that is equal to another of the same ops."""

    def __init__(self, graph: fx.GraphModule):
        self.graph = graph
        names: dict[Any, int] = {n: i for i, n in enumerate(graph.graph.nodes)}
        self.key = tuple(
            (
                str(n.target) if n.op == "call_function" else n.op,
                str(map_arg((n.args, n.kwargs), lambda a: f"%{names[a]}")),
            )
            for n in graph.graph.nodes
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self.key == other.key


def grid() -> tuple[Tensor, Tensor]:
    """Means and standard deviations, `[N]` each: dense where the function bends and around the border of the rules."""
    means = torch.tensor([0.05, 0.3, 0.7, 1.1, 1.7, 2.3, 2.9, 4.0, 5.0, 6.2, 9.0, 14.0, 20.0], dtype=torch.float64)
    scales = torch.tensor([0.03, 0.3, 0.7, 1.0, 1.2, 1.4, 1.401, 1.7, 2.0, 2.5, 4.0, 10.0, 100.0])
    m, s = torch.meshgrid(torch.cat([-means, means]), scales.double(), indexing="ij")
    return m.flatten(), s.flatten()


def reference(g: Function, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`E[g]`, `Var[g]` and `Cov(x, g)/v` by many short panels, borders one apart in `x` around zero."""
    nodes, weights = (torch.from_numpy(t) for t in np.polynomial.legendre.leggauss(12))
    m, s = m.unsqueeze(-1), s.unsqueeze(-1)
    fine = torch.linspace(-12, 12, 25, dtype=torch.float64).expand(len(m), -1)
    close = (torch.linspace(-24, 24, 49, dtype=torch.float64) - m) / s
    borders = torch.cat([fine, close.clamp(-12, 12)], 1).sort(1).values
    z = (borders[:, :-1, None] + borders.diff()[..., None] * (nodes + 1) / 2).flatten(1)
    mass = (borders.diff()[..., None] * weights / 2).flatten(1) * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    centre = g(m)
    deviation = g(m + s * z) - centre
    shift = (mass * deviation).sum(-1, keepdim=True)
    deviation = deviation - shift
    slope = (mass * z * deviation).sum(-1) / s.squeeze(-1)
    return (centre + shift).squeeze(-1), (mass * deviation.square()).sum(-1), slope


def agrees(found: tuple[Tensor, ...], true: tuple[Tensor, ...], s: Tensor, tolerance: float = TOLERANCE) -> bool:
    """But for what is below the last digits of single precision, given the largest slope."""
    size = float(true[2].abs().max())
    least = 1e-7 * size * s
    wrong = (
        (found[0] - true[0]).abs() > tolerance * true[1].sqrt() + 1e-2 * least,
        (found[1] - true[1]).abs() > 3 * tolerance * true[1] + least * least,
        (found[2] - true[2]).abs() > 3 * tolerance * true[2].abs() + 1e-7 * size,
    )
    return not any(bool(w.any()) for w in wrong)
