"""Layers that add their part to the covariance at once, without the Jacobian of all their weights in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.nodes import hint, is_transpose
from propagauss.passes.backwards.samples.axes import PLAIN, Axis, fronted
from propagauss.rules.adjoints.images import CONVOLUTIONS, patches, settings
from propagauss.rules.adjoints.shifts import Geometry

aten = torch.ops.aten
# where input, weight and bias stand among the arguments of a layer
_PLACES: dict[Any, tuple[int, int, int]] = {
    aten.linear.default: (0, 1, 2),
    aten.addmm.default: (1, 2, 0),
    **dict.fromkeys(CONVOLUTIONS, (0, 1, 2)),
}


@dataclass(frozen=True)
class Layer:
    """`h = W a + b` at every position of a sample; `stored` is the parameter behind the weight."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stored: fx.Node
    transposed: bool

    @property
    def is_convolution(self) -> bool:
        return self.node.target in CONVOLUTIONS

    @property
    def results(self) -> int:
        shape = self.weight.meta["val"].shape
        return hint(shape[1 if self.node.target == aten.addmm.default else 0])

    @property
    def inputs(self) -> int:
        shape = [hint(s) for s in self.weight.meta["val"].shape]
        return shape[0] if self.node.target == aten.addmm.default else math.prod(shape[1:])

    def positions(self, batch: int) -> int:
        """How many vectors a sample has."""
        entries = math.prod(hint(s) for s in self.node.meta["val"].shape)
        return entries // (batch * self.results)

    @property
    def geometry(self) -> Geometry | None:
        """Of a convolution whose images have a fixed size."""
        w, sizes = self.weight.meta["val"], tuple(self.x.meta["val"].shape[2:])
        if not self.is_convolution or not all(isinstance(s, int) for s in sizes):
            return None
        return Geometry(sizes, tuple(w.shape[2:]), *map(tuple, settings(w, *self.node.args[2:])))  # type: ignore[arg-type]

    def has_one_vector(self, axis: Axis | None) -> bool:
        return axis == PLAIN and not self.is_convolution and self.x.meta["val"].dim() == 2


def layer(node: fx.Node, is_random: Callable[[fx.Node], bool]) -> Layer | None:
    """The layer that an op is, if its weight is a random parameter that nothing else reads."""
    places = _PLACES.get(node.target)
    if places is None or node.kwargs:
        return None
    x, weight, bias = (node.args[i] if i < len(node.args) else None for i in places)
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or weight.meta["val"].dim() < 2:
        return None
    stored, transposed = weight, node.target == aten.addmm.default
    while is_transpose(stored) and len(stored.users) == 1 and isinstance(stored.args[0], fx.Node):
        stored, transposed = stored.args[0], not transposed
    if not is_random(stored):
        return None
    if not isinstance(bias, fx.Node) or not is_random(bias) or bias.meta["val"].dim() != 1:
        bias = None
    found = Layer(node, x, weight, bias, stored, transposed)
    if found.is_convolution and (_groups(node) != 1 or x.meta["val"].dim() != weight.meta["val"].dim()):
        return None
    return found


def _groups(node: fx.Node) -> Any:
    return node.args[6] if len(node.args) > 6 else 1


def at_positions(t: Tensor, dim: int, rows: int, before: int, lead: int = 0) -> Tensor:
    """Vectors in the last dimension, samples along the axis -> `[*lead, B, n, positions]`."""
    t = fronted(t, dim, rows, before, lead)
    return t.reshape(*t.shape[: lead + 1], -1, t.shape[-1]).mT


def on_patches(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    """The patches that a convolution meets: `[B, inputs, positions]`."""
    return patches(x, w, *settings(w, *rest)).flatten(1, 2)


def behind(g: Tensor) -> Tensor:
    """`[K, B, channels, *places] -> [K, B, channels, positions]`"""
    return g.flatten(3)
