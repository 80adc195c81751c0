"""Layers whose results are averaged over all positions, after nothing but functions of single entries.

Behind such an average (the last convolution of most networks for images) sensitivities are a product of what depends on
the output and what depends on the position: `g_kot = r_ko m_ot`, with slopes of activations in `m`. Then

    M_k,oi = r_ko N_oi,    N_oi = Σ_t m_ot a_ti

so that one Jacobian serves all outputs, and the layer is one with a variance for each entry of its result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from propagauss.nodes import hint
from propagauss.passes.backwards.layers import behind
from propagauss.rules.adjoints.elementwise import SLOPES, same
from propagauss.rules.adjoints.images import adaptive_average
from propagauss.rules.adjoints.positions import AveragedLayer, SharedLayer
from propagauss.rules.adjoints.registry import ADJOINTS
from propagauss.rules.adjoints.statistics import averaged, batch_norm, channel_scale

_ADDED = ADJOINTS[torch.ops.aten.add.Tensor]


def factor_averages(graph: fx.Graph, root: nn.Module) -> None:
    """Give such layers the factors `r` and `m` in place of `g`."""
    for node in list(graph.nodes):
        layer = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(layer, SharedLayer) or layer.left is not None or node.args[0].target is not behind:
            continue
        steps = _steps(node.args[0].args[0])
        if steps is None:
            continue
        with graph.inserting_before(node):
            rows, slopes = _factors(graph, steps)
        root.set_submodule(str(node.target), AveragedLayer(layer))
        node.args = (rows, slopes, *node.args[1:])


def _steps(g: Any) -> list[fx.Node] | None:
    """The adjoints between an average and a layer, from the average on; None if there are others among them."""
    found: list[fx.Node] = []
    while isinstance(g, fx.Node) and g.op == "call_function":
        found.append(g)
        if _is_average(g):
            return found[::-1]
        slope, scale = g.target in SLOPES, g.target is batch_norm and g.args[1] == 0
        if not slope and not scale and g.target is not same and not _is_sum(g):
            return None
        g = g.args[0]
    return None


def _shape(node: Any) -> list[int]:
    return [hint(s) for s in node.meta["val"].shape]


def _is_average(node: fx.Node) -> bool:
    """Whether it is the adjoint of an average over all places of images, `[B, C, *places] -> [B, C(, 1, ..)]`."""
    if node.target not in (adaptive_average, averaged):
        return False
    y, x = _shape(node.args[2]), _shape(node.args[3])
    return len(x) > 2 and y[:2] == x[:2] and all(s == 1 for s in y[2:])


def _is_sum(node: fx.Node) -> bool:
    """Whether it is the adjoint of a plain sum of equal shapes, which hands on what it gets."""
    if node.target is not _ADDED or node.kwargs or len(node.args) != 5:
        return False
    _, i, y, *terms = node.args
    return isinstance(terms[i], fx.Node) and _shape(y) == _shape(terms[i])  # type: ignore[index, call-overload]


def _factors(graph: fx.Graph, steps: list[fx.Node]) -> tuple[fx.Node, fx.Node]:
    average = steps[0]
    rows = graph.call_function(rows_of_average, (average.args[0], average.args[3]))
    slopes = graph.call_function(torch.ones_like, (average.args[3],))
    for step in steps[1:]:
        if step.target in SLOPES:
            _, _, y, x, *rest = step.args
            slope = graph.call_function(SLOPES[step.target], (x, y, *rest), step.kwargs)
            slopes = graph.call_function(torch.mul, (slopes, slope))
        elif step.target is batch_norm:
            _, _, _, _, w, _, _, var, _, _, eps, _ = step.args
            rows = graph.call_function(torch.mul, (rows, graph.call_function(channel_scale, (w, var, eps))))
    return rows, graph.call_function(torch.flatten, (slopes, 2))


def rows_of_average(g: Tensor, x: Tensor) -> Tensor:
    """`[K, B, C(, 1, ..)] -> [K, B, C]`: the share of every place of `x [B, C, *places]`."""
    return g.flatten(2) / math.prod(x.shape[2:])
