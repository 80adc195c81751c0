"""Sensitivities that a layer alone reads are not multiplied by the slopes of the activation behind it.

`(g s) diag(v) (g s)ᵀ = g diag(s² v) gᵀ`, with one slope for every entry of a sample, and `g` as many times that. Behind
the last activation `g` are the rows of the last weight, whose products can be made once and for all.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from propagauss.passes.backwards.results import weight_rows
from propagauss.rules.adjoints.elementwise import SLOPES, sign
from propagauss.rules.adjoints.forms import DiagonalLayer, SameRowsLayer

PRODUCTS = 2**18  # of rows of the last weight, at most


def move_gates(graph: fx.Graph, root: nn.Module) -> None:
    """Hand slopes to the layers whose noise they can multiply."""
    for node in list(graph.nodes):
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        gate = node.args[0] if isinstance(module, DiagonalLayer) else None
        if not isinstance(gate, fx.Node) or gate.target not in SLOPES:
            continue
        g, _, y, x, *rest = gate.args
        rows = _rows(root, g, module.full)  # type: ignore[union-attr]
        if len(gate.users) > 1 and rows is None:
            continue
        with graph.inserting_before(gate):
            slope = graph.call_function(SLOPES[gate.target], (x, y, *rest), gate.kwargs)
            moved = graph.call_function(torch.mul, (g, slope))
        gate.replace_all_uses_with(moved)
        graph.erase_node(gate)
        with graph.inserting_before(node):  # a sign is its own square
            factor = slope if slope.target is sign else graph.call_function(torch.square, (slope,))
        node.args, node.kwargs = (g, *node.args[1:]), {"factor": factor}
        if rows is not None:
            node.kwargs = {"factor": factor, "identity": g.args[0]}  # type: ignore[union-attr]
            root.set_submodule(str(node.target), SameRowsLayer(module, rows))  # type: ignore[arg-type]


def _rows(root: nn.Module, g: object, full: bool) -> Tensor | None:
    """The rows that all samples share, if `g` are such and their products are not too many."""
    if not isinstance(g, fx.Node) or g.target is not weight_rows:
        return None
    weight = g.args[1]
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None
    rows = root.get_buffer(str(weight.target))
    return rows if rows.numel() * (len(rows) if full else 1) <= PRODUCTS else None
